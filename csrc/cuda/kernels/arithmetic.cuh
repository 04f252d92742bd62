// Elements: folded and scaled as docs/determinism.md says, bit for bit what csrc/fold does.
//
// The NaN is our own code: instructions pass payloads on, and a test on the host would say nothing
// of them. So are conversions to bfloat16, for which the oldest architectures have none.
#pragma once

#include <limits>
#include <type_traits>

#include "base/element.h"
#include "base/formula.h"
#include "cuda/kernels/device.h"
#include "cuda/kernels/parameters.h"

namespace farandole::cuda {

using Float16 = NarrowFloat<kFloat16>;
using BFloat16 = NarrowFloat<kBFloat16>;

/// In the upper half; below it is what is left of rounding.
FARANDOLE_DEVICE uint32_t rounded_to_bfloat16(float value) {
  const uint32_t bits = value == value ? bits_as<uint32_t>(value) : 0x7fc00000;
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// Two in a word, the first one below: one instruction takes either out, and one joins them.
FARANDOLE_DEVICE float first_bfloat16(uint32_t pair) { return bits_as<float>(pair << 16); }
FARANDOLE_DEVICE float second_bfloat16(uint32_t pair) { return bits_as<float>(pair & 0xffff0000); }
FARANDOLE_DEVICE uint32_t bfloat16_pair(float first, float second) {
  return rounded_to_bfloat16(first) >> 16 | (rounded_to_bfloat16(second) & 0xffff0000);
}

/// Smaller of floats. Neither smaller: equal, where OR changes nothing but makes a negative zero of
/// two different ones, or unordered, where OR keeps the NaN a NaN.
template <typename Bits, typename Wide>
FARANDOLE_DEVICE Wide smaller_float(Wide lower, Wide upper) {
  if (lower < upper) return lower;
  if (lower > upper) return upper;
  return bits_as<Wide>(static_cast<Bits>(bits_as<Bits>(lower) | bits_as<Bits>(upper)));
}

template <typename Wide, typename WideBits>
struct FloatFormulas {
  FARANDOLE_DEVICE static Wide fold(Formula formula, Wide lower, Wide upper) {
    switch (formula) {
      case Formula::add:
        return lower + upper;
      case Formula::multiply:
        return lower * upper;
      case Formula::smaller:
        return smaller_float<WideBits>(lower, upper);
      case Formula::larger:
        break;
    }
    return -smaller_float<WideBits>(-lower, -upper);
  }
};

/// `Bits` as elements lie in memory; `Wide`, in which they are folded; between them widen, exact,
/// and narrow, rounded once, with the one NaN.
template <typename E>
struct Element;

template <>
struct Element<Float16> : FloatFormulas<float, uint32_t> {
  using Bits = uint16_t;
  using Wide = float;
  FARANDOLE_DEVICE static float widen(Bits bits) { return float32_from_float16(bits); }
  FARANDOLE_DEVICE static Bits narrow(float value) {
    return static_cast<Bits>(float16_from_float32(value));
  }
};

template <>
struct Element<BFloat16> : FloatFormulas<float, uint32_t> {
  using Bits = uint16_t;
  using Wide = float;
  FARANDOLE_DEVICE static float widen(Bits bits) { return bits_as<float>(uint32_t{bits} << 16); }
  FARANDOLE_DEVICE static Bits narrow(float value) {
    return static_cast<Bits>(rounded_to_bfloat16(value) >> 16);
  }
};

template <>
struct Element<float> : FloatFormulas<float, uint32_t> {
  using Bits = uint32_t;
  using Wide = float;
  FARANDOLE_DEVICE static float widen(Bits bits) { return bits_as<float>(bits); }
  FARANDOLE_DEVICE static Bits narrow(float value) {
    return value == value ? bits_as<Bits>(value) : Bits{0x7fc00000};
  }
};

template <>
struct Element<double> : FloatFormulas<double, uint64_t> {
  using Bits = uint64_t;
  using Wide = double;
  FARANDOLE_DEVICE static double widen(Bits bits) { return bits_as<double>(bits); }
  FARANDOLE_DEVICE static Bits narrow(double value) {
    return value == value ? bits_as<Bits>(value) : Bits{0x7ff8000000000000};
  }
};

/// Sums and products of integers wrap modulo 2^n: signed ones are those of the unsigned type.
template <typename T>
struct Element {
  using Bits = std::make_unsigned_t<T>;
  using Wide = Bits;
  FARANDOLE_DEVICE static Wide widen(Bits bits) { return bits; }
  FARANDOLE_DEVICE static Bits narrow(Wide value) { return value; }
  FARANDOLE_DEVICE static Wide fold(Formula formula, Wide lower, Wide upper) {
    switch (formula) {
      case Formula::add:
        return static_cast<Wide>(lower + upper);
      case Formula::multiply:  // in 32 bits at least: two uint16 would be multiplied as int
        return static_cast<Wide>(uint64_t{lower} * upper);
      case Formula::smaller:
        return static_cast<T>(lower) < static_cast<T>(upper) ? lower : upper;
      case Formula::larger:
        break;
    }
    return static_cast<T>(lower) > static_cast<T>(upper) ? lower : upper;
  }
};

/// Bytes; whatever is not zero is true, and the answer is 0 or 1.
template <>
struct Element<Boolean> {
  using Bits = uint8_t;
  using Wide = Bits;
  FARANDOLE_DEVICE static Wide widen(Bits bits) { return bits; }
  FARANDOLE_DEVICE static Bits narrow(Wide value) { return value; }
  FARANDOLE_DEVICE static Wide fold(Formula formula, Wide lower, Wide upper) {
    const bool either = formula == Formula::add || formula == Formula::larger;
    return either ? (lower | upper) != 0 : lower != 0 && upper != 0;
  }
};

template <typename E>
using BitsOfElement = typename Element<E>::Bits;

/// lower ⊕ upper, rounded to the dtype.
template <typename E>
FARANDOLE_DEVICE BitsOfElement<E> fold_element(Formula formula, BitsOfElement<E> lower,
                                               BitsOfElement<E> upper) {
  using A = Element<E>;
  return A::narrow(A::fold(formula, A::widen(lower), A::widen(upper)));
}

/// Toward zero; beyond the ends, the end. Not a number: 0. Two functions for all integers, apart:
/// conversions and a division of 64 bits for each of 16 elements would be most of the module.
/// `ends`: of the type, and the first double above it.
template <typename Wide>
struct Ends {
  Wide least, most;
  double lowest, above;
};
template <typename T>
using WideOf = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;

template <typename Wide>
FARANDOLE_DEVICE_APART Wide scale_integer(Wide value, double factor, int64_t divide,
                                          const Ends<Wide> ends) {
  // Beyond 2^53 not every integer is a double: a factor of one must not round.
  if (factor != 1) {
    const double scaled = static_cast<double>(value) * factor;
    if (scaled >= ends.above)
      value = ends.most;
    else if (scaled <= ends.lowest)
      value = ends.least;
    else
      value = scaled == scaled ? static_cast<Wide>(scaled) : Wide{0};
  }
  return divide > 1 ? value / static_cast<Wide>(divide) : value;
}

/// An element times a factor, where `by.applies`.
template <typename E>
FARANDOLE_DEVICE BitsOfElement<E> scale_element(BitsOfElement<E> bits, const Scaling& by) {
  using A = Element<E>;
  if constexpr (std::is_same_v<E, Boolean>) {
    return bits != 0 && by.float64 != 0;
  } else if constexpr (std::is_integral_v<E>) {
    using Wide = WideOf<E>;
    constexpr E kMost = std::numeric_limits<E>::max(), kLeast = std::numeric_limits<E>::lowest();
    constexpr Ends<Wide> kEnds{kLeast, kMost, static_cast<double>(kLeast),
                               2.0 * static_cast<double>(kMost / 2 + 1)};  // 2^n
    const Wide wide = static_cast<E>(bits);
    return static_cast<BitsOfElement<E>>(scale_integer(wide, by.float64, by.divide, kEnds));
  } else if constexpr (std::is_same_v<typename A::Wide, double>) {
    return A::narrow(A::widen(bits) * by.float64);
  } else {
    return A::narrow(A::widen(bits) * by.float32);
  }
}

}  // namespace farandole::cuda
