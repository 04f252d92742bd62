// AVX2 and F16C: float16 by the conversion instructions, which keep subnormals in any mode.
#include <immintrin.h>

#define FARANDOLE_VECTOR_BYTES 32
#include "fold/instruction_sets/parts.h"
#include "fold/instruction_sets/vectors.h"

namespace farandole {
namespace {

Floats square_root(const Floats& values) { return _mm256_sqrt_ps(values); }
Vector<double> square_root(const Vector<double>& values) { return _mm256_sqrt_pd(values); }

bool any_nan(const Floats& a, const Floats& b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}

/// As vectors.h has it, rounding sixteen numbers at a time: up where what is cut off is more than
/// half a unit, or half a unit and the number odd.
Words bfloat16_pairs(Floats low, Floats high) {
  make_canonical(low, high);
  const __m256i below = _mm256_castps_si256(low), above = _mm256_castps_si256(high);
  const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32(below, 16), above, 0xaa);
  const __m256i cut = _mm256_blend_epi16(below, _mm256_slli_epi32(above, 16), 0xaa);
  const __m256i over = _mm256_xor_si256(cut, _mm256_set1_epi16(INT16_MIN));  // cut - half a unit
  const __m256i odd = _mm256_and_si256(kept, _mm256_set1_epi16(1));
  const __m256i up = _mm256_cmpgt_epi16(_mm256_adds_epi16(over, odd), _mm256_setzero_si256());
  return reinterpret_cast<Words>(_mm256_sub_epi16(kept, up));
}

struct Conversions {
  static Floats widen(const Halves& halves) {
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(halves));
  }
  static Halves narrow(const Floats& values) {
    return reinterpret_cast<Halves>(
        _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
using Float16 = ConvertedHalves<Conversions>;

}  // namespace
}  // namespace farandole

#include "fold/instruction_sets/kernels.h"

namespace farandole {
constinit const Kernels kAvx2Kernels = make_kernels();
}  // namespace farandole
