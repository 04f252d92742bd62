// The kernels, as nvcc has compiled them.
#pragma once

namespace farandole::cuda {

/// A fatbin in this library; null where it was built without nvcc.
const void* kernel_image();
/// Those for a switch between devices, of compute capability 9.0 and more; null where that nvcc was
/// older than 12.2, too.
const void* nvls_image();

}  // namespace farandole::cuda
