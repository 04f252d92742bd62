// An optimizer's step on some elements: from a gradient to new parameters and new state. The
// formulas are those of torch.optim's loops over single tensors, each operation rounded once.
//
// Pure functions over memory the caller owns, as in fold.h: every instruction set gives the same
// bits, whatever the floating-point mode of the calling thread.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "base/dtype.h"
#include "base/update_factors.h"

namespace farandole {

/// By UpdateKind.
inline constexpr std::array<std::string_view, 3> kUpdateNames{"sgd", "momentum", "adam"};

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

/// How many tiles of so many elements a stretch touches that begins `begin` elements behind one.
constexpr size_t tiles_of(size_t begin, size_t count, size_t tile) {
  return count == 0 ? 0 : (begin + count + tile - 1) / tile;
}
/// Both in double and in one order of additions, which depends on `count` alone. A NaN among the
/// elements gives NaN.
double sum_of_squares(const std::byte* elements, size_t count, DType dtype);
double largest_magnitude(const std::byte* elements, size_t count, DType dtype);

}  // namespace farandole
