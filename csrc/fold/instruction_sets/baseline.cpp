// The compiler's default target. float16 in integers and one exact multiplication.
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define FARANDOLE_VECTOR_BYTES 16
#include "fold/instruction_sets/parts.h"
#include "fold/instruction_sets/vectors.h"

namespace farandole {
namespace {

#if defined(__SSE2__)
Floats square_root(const Floats& values) { return _mm_sqrt_ps(values); }
Vector<double> square_root(const Vector<double>& values) { return _mm_sqrt_pd(values); }
bool any_nan(const Floats& a, const Floats& b) {
  return _mm_movemask_ps(_mm_cmpunord_ps(a, b)) != 0;
}
#else
Floats square_root(Floats values) {
  for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i)
    values[i] = __builtin_sqrtf(values[i]);
  return values;
}
Vector<double> square_root(Vector<double> values) {
  for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i)
    values[i] = __builtin_sqrt(values[i]);
  return values;
}
bool any_nan(const Floats& a, const Floats& b) {
  const SignedWords nan = (a != a) | (b != b);
  int32_t any = 0;
  for (size_t i = 0; i < sizeof nan / sizeof nan[0]; ++i) any |= nan[i];
  return any != 0;
}
#endif

Words bfloat16_pairs(Floats low, Floats high) {
  make_canonical(low, high);
  return rounded_pairs(low, high);
}

struct Float16 {
  using Pack = Words;
  static constexpr size_t kBytes = 2;

  template <typename F, typename... Packs>
  static Pack map(F formula, const Packs&... packs) {
    Floats low = formula(float32_from_float16(packs & 0xffff)...);
    Floats high = formula(float32_from_float16(packs >> 16)...);
    make_canonical(low, high);
    return float16_from_float32(low) | float16_from_float32(high) << 16;
  }

  static Floats widen(const Halves& halves) {
    return float32_from_float16(__builtin_convertvector(halves, Words));
  }
  static Halves narrow(const Floats& values) {
    return __builtin_convertvector(float16_from_float32(values), Halves);
  }
};

}  // namespace
}  // namespace farandole

#include "fold/instruction_sets/kernels.h"

namespace farandole {
constinit const Kernels kBaselineKernels = make_kernels();
}  // namespace farandole
