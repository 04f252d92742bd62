// What kernels and exchanges reach on a device: for benchmarks, by one process, whose threads are
// the ranks. So the device's time slices, which processes get by turns, are no part of it.
#pragma once

#include "base/cuda_table.h"

namespace farandole::cuda {

int32_t measure(CudaMeasurement* measurement, CudaFailure* failure);

}  // namespace farandole::cuda
