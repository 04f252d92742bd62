// The IEEE formats and exact conversions between them, in integers alone: constant expressions,
// independent of the floating-point mode and of the instruction set.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

namespace farandole {

/// A binary interchange format: sign, `exponent` bits, `mantissa` bits, from the top.
struct FloatFormat {
  int exponent;
  int mantissa;

  constexpr int bias() const { return (1 << (exponent - 1)) - 1; }
  constexpr uint64_t infinity() const { return ((uint64_t{1} << exponent) - 1) << mantissa; }
  constexpr uint64_t quiet_nan() const { return infinity() | uint64_t{1} << (mantissa - 1); }
  constexpr uint64_t sign() const { return uint64_t{1} << (exponent + mantissa); }
};

inline constexpr FloatFormat kFloat16{5, 10};
inline constexpr FloatFormat kBFloat16{8, 7};
inline constexpr FloatFormat kFloat32{8, 23};
inline constexpr FloatFormat kFloat64{11, 52};

/// The unsigned integer as wide as a format.
template <FloatFormat format, int bits = 1 + format.exponent + format.mantissa>
using BitsOf = std::conditional_t<
    bits == 8, uint8_t,
    std::conditional_t<bits == 16, uint16_t, std::conditional_t<bits == 32, uint32_t, uint64_t>>>;

/// The number `bits` of format `from` in format `to`: rounded once, to nearest, ties to even;
/// subnormals are kept; every NaN becomes the positive quiet NaN without payload.
template <FloatFormat from, FloatFormat to>
constexpr uint64_t convert(uint64_t bits) {
  const uint64_t sign = (bits & from.sign()) != 0 ? to.sign() : 0;
  const uint64_t magnitude = bits & (from.sign() - 1);
  if (magnitude > from.infinity()) return to.quiet_nan();
  if (magnitude == from.infinity()) return sign | to.infinity();
  if (magnitude == 0) return sign;

  // The number is significand · 2^unit, and its highest bit is worth 2^highest.
  const int field = static_cast<int>(magnitude >> from.mantissa);
  const uint64_t fraction = magnitude & ((uint64_t{1} << from.mantissa) - 1);
  const uint64_t significand = field == 0 ? fraction : fraction | uint64_t{1} << from.mantissa;
  const int unit = (field == 0 ? 1 : field) - from.bias() - from.mantissa;
  const int highest = unit + 63 - std::countl_zero(significand);
  if (highest > to.bias()) return sign | to.infinity();

  // The result counts in 2^(its own unit); below the normal numbers that unit stays put.
  const int lowest_normal = 1 - to.bias();
  const int exponent = highest < lowest_normal ? lowest_normal : highest;
  const int dropped = exponent - to.mantissa - unit;  // bits that leave at the bottom
  uint64_t kept = 0;
  if (dropped <= 0) {
    kept = significand << -dropped;
  } else if (dropped < 64) {
    const uint64_t rest = significand & ((uint64_t{1} << dropped) - 1);
    const uint64_t half = uint64_t{1} << (dropped - 1);
    kept = significand >> dropped;
    if (rest > half || (rest == half && (kept & 1) != 0)) ++kept;
  }
  // `kept` brings its own leading one, so a carry out of the mantissa lands in the exponent, also
  // from the largest subnormal to the smallest normal and from the largest number to infinity.
  return sign | ((static_cast<uint64_t>(exponent - lowest_normal) << to.mantissa) + kept);
}

constexpr float float_from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
constexpr uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
constexpr uint64_t bits_of(double value) { return __builtin_bit_cast(uint64_t, value); }

constexpr float float16_to_float(uint16_t half) {
  return float_from_bits(static_cast<uint32_t>(convert<kFloat16, kFloat32>(half)));
}
constexpr float bfloat16_to_float(uint16_t half) {
  return float_from_bits(static_cast<uint32_t>(convert<kBFloat16, kFloat32>(half)));
}
constexpr uint16_t float_to_float16(float value) {
  return static_cast<uint16_t>(convert<kFloat32, kFloat16>(bits_of(value)));
}
constexpr uint16_t float_to_bfloat16(float value) {
  return static_cast<uint16_t>(convert<kFloat32, kBFloat16>(bits_of(value)));
}

static_assert(float16_to_float(0x3c00) == 1.0F && float16_to_float(0x0001) == 0x1p-24F);
static_assert(float_to_float16(65519.0F) == 0x7bff && float_to_float16(65520.0F) == 0x7c00);
static_assert(float_to_float16(0x1p-25F) == 0x0000 && float_to_float16(0x1.8p-25F) == 0x0001);
static_assert(float_to_bfloat16(-1.00390625F) == 0xbf80 && float_to_bfloat16(0x1p-133F) == 0x0001);

}  // namespace farandole
