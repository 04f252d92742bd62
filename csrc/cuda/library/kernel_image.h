// The kernels, as nvcc has compiled them.
#pragma once

namespace farandole::cuda {

/// A fatbin in this library; null where it was built without nvcc.
const void* kernel_image();

}  // namespace farandole::cuda
