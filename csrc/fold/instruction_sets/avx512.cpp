// AVX-512 as its first processors have it: bfloat16 in integers.
#include "fold/instruction_sets/avx512.h"

namespace farandole {
namespace {

Words bfloat16_pairs(Floats low, Floats high) {
  make_canonical(low, high);
  return rounded_pairs(low, high);
}

}  // namespace
}  // namespace farandole

#include "fold/instruction_sets/kernels.h"

namespace farandole {
constinit const Kernels kAvx512Kernels = make_kernels();
}  // namespace farandole
