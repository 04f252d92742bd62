// Measures the speed of kernels and exchanges on a device: for benchmarks, by one process, whose
// threads are the ranks. So time slices, which processes get by turns, are no part of it.
#pragma once

#include "base/cuda_table.h"

namespace farandole::cuda {

int32_t measure(CudaMeasurement* measurement, CudaFailure* failure);

}  // namespace farandole::cuda
