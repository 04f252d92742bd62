// From an optimizer's settings, as users know them, to the factors of one step.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "fold/update.h"

namespace farandole {

enum class Optimizer : uint8_t { sgd, adam };
inline constexpr std::array<std::string_view, 2> kOptimizerNames{"sgd", "adam"};
std::optional<Optimizer> optimizer_named(std::string_view name);

/// The settings of one group of parameters. `decoupled` weight decay is AdamW's.
struct HyperParameters {
  double rate = 0, weight_decay = 0;
  double momentum = 0, dampening = 0;        // sgd
  double beta1 = 0, beta2 = 0, epsilon = 0;  // adam
  bool nesterov = false, decoupled = false, maximize = false;
};

UpdateKind kind_of(Optimizer optimizer, const HyperParameters& h);

/// The `step`-th update, from 1, of a parameter whose reduced gradient is taken times `factor`.
UpdateFactors factors_for(Optimizer optimizer, const HyperParameters& h, int64_t step,
                          double factor);

/// For people, and to compare between ranks: every digit.
std::string describe(Optimizer optimizer, const HyperParameters& h);

}  // namespace farandole
