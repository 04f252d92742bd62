#include "cuda/library/kernel_image.h"

#ifdef FARANDOLE_HAS_KERNELS
#include "cuda/fatbin.h"
#endif

namespace farandole::cuda {

const void* kernel_image() {
#ifdef FARANDOLE_HAS_KERNELS
  return farandole_fatbin;
#else
  return nullptr;
#endif
}

const void* nvls_image() {
#ifdef FARANDOLE_HAS_NVLS
  return farandole_nvls_fatbin;
#else
  return nullptr;
#endif
}

}  // namespace farandole::cuda
