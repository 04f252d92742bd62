// Exceptions end at the border of the library, where they are converted to a CudaFailure.
#pragma once

#include <exception>

#include "base/cuda_table.h"
#include "base/error.h"
#include "base/fixed_text.h"

namespace farandole::cuda {

inline void tell(const Error& error, CudaFailure* failure) {
  failure->kind = 1 + static_cast<int32_t>(error.code());
  copy_cut(error.verdict(), failure->verdict);
  copy_cut(error.where().evidence, failure->evidence);
  copy_cut(error.advice(), failure->advice);
}

/// Returns what `act` returns; 0 or null where it throws, with its error in `failure`.
template <typename Act>
auto guarded(CudaFailure* failure, const Act& act) -> decltype(act()) {
  try {
    return act();
  } catch (const Error& error) {
    tell(error, failure);
  } catch (const std::exception& error) {
    tell(Error(ErrorCode::internal, error.what()), failure);
  }
  return {};
}

}  // namespace farandole::cuda
