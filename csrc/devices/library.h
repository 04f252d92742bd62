// The library for CUDA as the engine sees it: the table of functions that it hands out
// (base/cuda_table.h), come by when the first array on a device is met.
#pragma once

#include <functional>
#include <utility>

#include "base/cuda_table.h"
#include "base/error.h"

namespace farandole {

/// `find`: opens the library, or throws Error saying why there is none. Asked again until it
/// succeeds.
void find_cuda_by(std::function<const CudaTable*()> find);

/// The library, with a driver and a device below it. Throws Error(device) with one sentence where
/// one of the three is missing, Error(forked) in the child of a process that has used them.
const CudaTable& cuda_library();

/// Converts a failure of the library to an Error.
Error error_of(const CudaFailure& failure);

/// Calls a function of the table and returns its result. Throws its failure where that is 0.
template <typename Function, typename... Arguments>
auto ask_cuda(const Function& function, Arguments&&... arguments) {
  CudaFailure failure{};
  const auto answer = function(std::forward<Arguments>(arguments)..., &failure);
  if (!answer) throw error_of(failure);
  return answer;
}

}  // namespace farandole
