// AVX-512, but for bfloat16: float16 by the conversion instructions, which keep subnormals in any
// mode. Included once by each translation unit whose instruction set has it.
#pragma once

#include <immintrin.h>

#define FARANDOLE_VECTOR_BYTES 64
#include "fold/instruction_sets/vectors.h"

namespace farandole {
namespace {

/// The last, incomplete pack of `bytes`, which are at least one, through a mask: what lies behind
/// it in memory is neither read nor written, and counts as zero.
template <typename Pack>
Pack load_part(const std::byte* from, size_t bytes) {
  const uint64_t mask = ~uint64_t{0} >> (64 - bytes);
  if constexpr (sizeof(Pack) == 64)
    return __builtin_bit_cast(Pack, _mm512_maskz_loadu_epi8(mask, from));
  else
    return __builtin_bit_cast(Pack, _mm256_maskz_loadu_epi8(static_cast<__mmask32>(mask), from));
}

template <typename Pack>
void store_part(std::byte* to, const Pack& pack, size_t bytes) {
  const uint64_t mask = ~uint64_t{0} >> (64 - bytes);
  if constexpr (sizeof(Pack) == 64)
    _mm512_mask_storeu_epi8(to, mask, __builtin_bit_cast(__m512i, pack));
  else
    _mm256_mask_storeu_epi8(to, static_cast<__mmask32>(mask), __builtin_bit_cast(__m256i, pack));
}

// Masked: the plain intrinsics start from an undefined vector, of which gcc 12 warns.
Floats square_root(const Floats& values) { return _mm512_maskz_sqrt_ps(0xffff, values); }
Vector<double> square_root(const Vector<double>& values) {
  return _mm512_maskz_sqrt_pd(0xff, values);
}

bool any_nan(const Floats& a, const Floats& b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
}

struct Conversions {
  // The unmasked intrinsics start from an undefined vector, of which gcc 12 warns.
  static constexpr __mmask16 kAllLanes = 0xffff;

  static Floats widen(const Halves& halves) {
    return _mm512_maskz_cvtph_ps(kAllLanes, reinterpret_cast<__m256i>(halves));
  }
  static Halves narrow(const Floats& values) {
    return reinterpret_cast<Halves>(
        _mm512_maskz_cvtps_ph(kAllLanes, values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
using Float16 = ConvertedHalves<Conversions>;

}  // namespace
}  // namespace farandole
