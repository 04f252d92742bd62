// The kernels, as nvcc has compiled them.
#pragma once

#include <span>
#include <string>

#include "cuda/driver/device.h"

namespace farandole::cuda {

/// The fatbin that lies beside this module, read once. Throws Error(device) where there is none.
const void* kernel_image();

/// The compiler and the targets of the fatbin.
struct KernelBuild {
  int nvcc = 0;                // 13000: of CUDA 13.0; 0: none
  std::span<const int> codes;  // capabilities that have code of their own; the first has PTX, too
};
KernelBuild kernel_build();

/// Why a driver of this version does not load them for a device: one sentence; empty where it does.
std::string why_not_loaded(const KernelBuild& build, int driver_version,
                           const DeviceProperties& device);

}  // namespace farandole::cuda
