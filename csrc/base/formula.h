// The arithmetic of a reduce operation (reduce_op.h) on two elements. Device kernels know
// nothing else of the operation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

/// How two elements become one. On booleans add is "or", multiply is "and", as in numpy.
enum class Formula : uint8_t { add, multiply, smaller, larger };
inline constexpr size_t kFormulas = 4;
constexpr size_t index(Formula formula) { return static_cast<size_t>(formula); }

}  // namespace farandole
