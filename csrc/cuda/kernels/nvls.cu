// The entry points of a module of its own, for devices of compute capability 9.0 and more: their
// instructions are not in the code that is common to all. fatbin.cmake compiles it.
#include "cuda/kernels/nvls.cuh"

namespace farandole::cuda {

#define KERNEL(name, Parameters, function)                                \
  extern "C" __global__ void __launch_bounds__(kThreads, kResidentBlocks) \
      name(const __grid_constant__ Parameters p) {                        \
    function(p);                                                          \
  }
#include "cuda/kernels/nvls_table.h"
#undef KERNEL

}  // namespace farandole::cuda
