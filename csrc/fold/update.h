// An optimizer's step on some elements: from a gradient to new parameters and new state. The
// formulas are those of torch.optim's loops over single tensors, each operation rounded once.
//
// Pure functions over memory the caller owns, as in fold.h: every instruction set gives the same
// bits, whatever the floating-point mode of the calling thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"

namespace farandole {

/// With g = gradient · factor (+ decay · value, unless decay is 0):
///
///   sgd        value += step · g
///   momentum   first = keep_first · first + take_first · g      (fresh: first = g)
///              value += step · first                            (nesterov: g + keep_first · first)
///   adam       first = lerp(first, g, take_first);  second = keep_second · second + take_second ·
///   g²
///              value = shrink · value + step · first / (√second / root + epsilon)
enum class UpdateKind : uint8_t { sgd, momentum, adam };
inline constexpr std::array<std::string_view, 3> kUpdateNames{"sgd", "momentum", "adam"};
inline constexpr size_t kMostSlots = 2;

/// How many numbers of state an element has.
constexpr size_t slots_of(UpdateKind kind) { return static_cast<size_t>(kind); }

/// Worked out in double, and converted once to the dtype.
struct UpdateFactors {
  double gradient = 1;
  double decay = 0;
  double shrink = 1;
  double keep_first = 0, take_first = 1;
  double keep_second = 0, take_second = 1;
  double step = 0;
  double root = 1, epsilon = 0;
  bool fresh = false, nesterov = false;
  bool unused[6] = {};  // nothing of what a kernel is given is unset
};
static_assert(sizeof(UpdateFactors) == 10 * sizeof(double) + 8 * sizeof(bool));

/// `count` elements each; of `state`, slots_of(kind) are looked at. No two overlap.
struct UpdateArrays {
  std::byte* value;
  const std::byte* gradient;
  std::byte* state[kMostSlots];
  size_t count;
};

/// float32 and float64 are updated; nothing else is.
constexpr bool can_update(DType dtype) { return row(dtype).kind == DTypeKind::floating; }
void update(UpdateKind kind, DType dtype, const UpdateArrays& arrays, const UpdateFactors& factors);

/// Both in double and in one order of additions, which depends on `count` alone. A NaN among the
/// elements gives NaN.
double sum_of_squares(const std::byte* elements, size_t count, DType dtype);
double largest_magnitude(const std::byte* elements, size_t count, DType dtype);

}  // namespace farandole
