// AVX2 and F16C: float16 by the conversion instructions, which keep subnormals in any mode.
#include <immintrin.h>

#define FARANDOLE_VECTOR_BYTES 32
#include "fold/instruction_sets/parts.h"
#include "fold/instruction_sets/vectors.h"

namespace farandole {
namespace {

Floats square_root(const Floats& values) { return _mm256_sqrt_ps(values); }
Vector<double> square_root(const Vector<double>& values) { return _mm256_sqrt_pd(values); }

struct Float16 {
  using Halves = Vector<uint16_t, kVectorBytes / 2>;
  using Pack = Halves;
  static constexpr size_t kBytes = 2;

  static Floats widen(const Halves& halves) {
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(halves));
  }
  static Halves narrow(const Floats& values) {
    return reinterpret_cast<Halves>(
        _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  template <typename F, typename... Packs>
  static Pack map(F formula, const Packs&... packs) {
    return narrow(canonical<Floats>(formula(widen(packs)...)));
  }
};

}  // namespace
}  // namespace farandole

#include "fold/instruction_sets/kernels.h"

namespace farandole {
constinit const Kernels kAvx2Kernels = make_kernels();
}  // namespace farandole
