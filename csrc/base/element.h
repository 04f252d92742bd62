// The types of elements, beside those of C++: all that kernels of devices know of dtype.h.
#pragma once

#include <cstdint>

#include "base/half.h"

namespace farandole {

/// Elements for which C++ has no type.
template <FloatFormat format>
struct NarrowFloat {
  BitsOf<format> bits;
};
struct Boolean {
  uint8_t bits;  // whatever is not zero is true
};

/// The format of floating-point elements; of others, none.
template <typename T>
inline constexpr FloatFormat kFormatOf{};
template <>
inline constexpr FloatFormat kFormatOf<float> = kFloat32;
template <>
inline constexpr FloatFormat kFormatOf<double> = kFloat64;
template <FloatFormat format>
inline constexpr FloatFormat kFormatOf<NarrowFloat<format>> = format;

template <typename T>
concept FloatingElement = kFormatOf<T>.mantissa > 0;

}  // namespace farandole
