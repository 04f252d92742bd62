// The factors of an optimizer's step: plain values, the same for the host's loops, the kernels of
// devices and the library between (cuda/work.h).
#pragma once

#include <cstddef>
#include <cstdint>

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

/// Partial sums of a norm, side by side: element i goes to sum i modulo this.
inline constexpr uint32_t kNormLanes = 16;

}  // namespace farandole
