// Vectors of kVectorBytes, and the halves as lanes of float32. Included once by each instruction
// set's translation unit, which defines FARANDOLE_VECTOR_BYTES first.
//
// Note [One source, many instruction sets]
// Everything below lies in an unnamed namespace and calls nothing of the standard library: an
// inline function with a public name, compiled here for a newer processor, could be the copy that
// the linker keeps for the whole program, which would then die on an older one.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __FAST_MATH__
#error "docs/determinism.md asks for IEEE arithmetic: compile without -ffast-math"
#endif

namespace farandole {
namespace {

constexpr size_t kVectorBytes = FARANDOLE_VECTOR_BYTES;

template <typename T, size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T, size_t kBytes = kVectorBytes>
using Vector = typename VectorOf<T, kBytes>::type;

using Floats = Vector<float>;
using Words = Vector<uint32_t>;
using SignedWords = Vector<int32_t>;

template <typename Pack>
Pack load(const std::byte* from) {
  Pack pack;
  __builtin_memcpy(&pack, from, sizeof pack);
  return pack;
}

template <typename Pack>
void store(std::byte* to, const Pack& pack) {
  __builtin_memcpy(to, &pack, sizeof pack);
}

/// Halves that widen to one vector of floats; and two of them, read and written one by one:
/// taking a vector apart costs more than a second load.
using Halves = Vector<uint16_t, kVectorBytes / 2>;
struct HalvesPair {
  Halves first, second;
};

template <>
[[maybe_unused]] HalvesPair load<HalvesPair>(const std::byte* from) {
  return {load<Halves>(from), load<Halves>(from + sizeof(Halves))};
}

template <>
[[maybe_unused]] void store<HalvesPair>(std::byte* to, const HalvesPair& pack) {
  store(to, pack.first);
  store(to + sizeof pack.first, pack.second);
}

Floats as_floats(const Words& bits) { return reinterpret_cast<Floats>(bits); }
Words as_words(const Floats& values) { return reinterpret_cast<Words>(values); }
SignedWords as_signed(const Words& bits) { return reinterpret_cast<SignedWords>(bits); }

/// Every NaN becomes the one quiet NaN, so that its bits do not tell how it came about: which
/// operand's payload survives depends on the instruction and on the compiler.
template <typename V>
V canonical(const V& values) {
  using Lane = __typeof__(values[0] + 0);
  const V nan = V{} + static_cast<Lane>(__builtin_nan(""));
  return values == values ? values : nan;
}

/// Whether a lane of either is NaN. By the instruction set: no vector expression asks for less than
/// one comparison each.
bool any_nan(const Floats& a, const Floats& b);

/// canonical() of both, for the price of one comparison: there hardly ever is a NaN.
void make_canonical(Floats& a, Floats& b) {
  if (!any_nan(a, b)) [[likely]]
    return;
  a = canonical(a);
  b = canonical(b);
}

/// float16 where instructions convert: `Conversions` are widen and narrow.
template <typename Conversions>
struct ConvertedHalves : Conversions {
  using Pack = HalvesPair;
  static constexpr size_t kBytes = 2;

  template <typename F, typename... Packs>
  static Pack map(F formula, const Packs&... packs) {
    Floats first = formula(Conversions::widen(packs.first)...);
    Floats second = formula(Conversions::widen(packs.second)...);
    make_canonical(first, second);
    return {Conversions::narrow(first), Conversions::narrow(second)};
  }
};

/// float32 that is no NaN but the canonical one, rounded to bfloat16 in the upper half of each
/// lane.
Words rounded_to_bfloat16(const Floats& values) {
  const Words bits = as_words(values);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

/// Both rounded so, `low` in the lower half of each lane.
[[maybe_unused]] Words rounded_pairs(const Floats& low, const Floats& high) {
  return (rounded_to_bfloat16(high) & 0xffff0000) | rounded_to_bfloat16(low) >> 16;
}

/// The same, with every NaN made canonical first. By the instruction set.
Words bfloat16_pairs(Floats low, Floats high);

/// float16 in the lower half of each lane, the upper half zero; exact.
[[maybe_unused]] Floats float32_from_float16(const Words& halves) {
  // The exponent moves over as it is; the multiplication corrects its bias, also of subnormals.
  const Words magnitude = (halves & 0x7fff) << 13;
  const Words value = as_words(as_floats(magnitude) * 0x1p112F);
  const Words special = reinterpret_cast<Words>(as_signed(magnitude) >= 0x1f << 23);
  return as_floats(value | (special & 0x7f800000) | (halves & 0x8000) << 16);
}

/// float32 that is no NaN but the canonical one, rounded to float16 in the lower half of each lane.
[[maybe_unused]] Words float16_from_float32(const Floats& values) {
  const Words bits = as_words(values);
  const Words magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude - (112U << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 lines the number up with the unit of float16's subnormals, and rounds it there.
  const Words subnormal = as_words(as_floats(magnitude) + 0.5F) - 0x3f000000;
  const Words infinite = Words{} + 0x7c00, nan = Words{} + 0x7e00;
  const SignedWords size = as_signed(magnitude);
  const Words half = size < 0x38800000   ? subnormal
                     : size < 0x47800000 ? normal
                     : size > 0x7f800000 ? nan
                                         : infinite;
  return half | ((bits >> 16) & 0x8000);
}

}  // namespace
}  // namespace farandole
