// CUDA's driver, come by when the first array on a device is met.
#pragma once

#include <functional>

#include "cuda/nccl/nccl_functions.h"

namespace farandole {

/// `places`: says where to look for NCCL, once, when a device is first needed.
void look_for_nccl_by(std::function<cuda::NcclPlaces()> places);

/// Throws Error(device) with one sentence where there is no driver, or no device below it;
/// Error(forked) in the child of a process that has used them.
void require_devices();

}  // namespace farandole
