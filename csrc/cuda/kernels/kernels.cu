// The entry points of the device's module. fatbin.cmake compiles this file alone.
#include "cuda/kernels/bucket.cuh"
#include "cuda/kernels/exchange.cuh"
#include "cuda/kernels/graph.cuh"
#include "cuda/kernels/lanes.cuh"
#include "cuda/kernels/norm.cuh"
#include "cuda/kernels/update.cuh"

namespace farandole::cuda {

#define KERNEL(name, Parameters, function)                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, kFittingBlocks<Parameters>) \
      name(const __grid_constant__ Parameters p) {                                   \
    function(p);                                                                     \
  }
#include "cuda/kernels/table.h"
#undef KERNEL

}  // namespace farandole::cuda
