// The kernels, compiled for the host: csrc/cuda/kernels/*.cu with other entry points.
#include "cuda/kernels/bucket.cuh"
#include "cuda/kernels/exchange.cuh"
#include "cuda/kernels/graph.cuh"
#include "cuda/kernels/lanes.cuh"
#include "cuda/kernels/norm.cuh"
#include "cuda/kernels/update.cuh"
#include "executor.h"

namespace farandole::cuda {

std::span<const Kernel> kernels() {
  static constexpr Kernel kKernels[] = {
#define KERNEL(name, Parameters, function) \
  {#name, sizeof(Parameters),              \
   [](const void* parameters) { (function)(*static_cast<const Parameters*>(parameters)); }},
#include "cuda/kernels/table.h"
#undef KERNEL
  };
  return kKernels;
}

}  // namespace farandole::cuda
