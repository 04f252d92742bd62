#include "cuda/library/kernel_image.h"

#ifdef FARANDOLE_FATBIN
// The file as it is, where the driver may read it without a copy.
asm(R"(
  .section .rodata
  .balign 16
  .hidden farandole_fatbin
farandole_fatbin:
  .incbin ")" FARANDOLE_FATBIN R"("
  .previous
)");
extern "C" __attribute__((visibility("hidden"))) const char farandole_fatbin[];
#endif

namespace farandole::cuda {

const void* kernel_image() {
#ifdef FARANDOLE_FATBIN
  return farandole_fatbin;
#else
  return nullptr;
#endif
}

}  // namespace farandole::cuda
