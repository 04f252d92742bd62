// The kernels as the device's driver takes them (cuModuleLoadData): code for each architecture and
// PTX for later ones. Only where the build had a compiler for them; those of nvls.cu only where it
// was new enough (CUDA 12.2).
#pragma once

#include <cstddef>

extern "C" {
extern const unsigned char farandole_fatbin[];
extern const std::size_t farandole_fatbin_bytes;
extern const unsigned char farandole_nvls_fatbin[];
extern const std::size_t farandole_nvls_fatbin_bytes;
}
