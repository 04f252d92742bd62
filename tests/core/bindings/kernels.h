// The kernels on bytes, for one named instruction set.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "base/error.h"
#include "fold/kernels.h"

namespace farandole {

namespace py = pybind11;

inline const Kernels& kernels_named(std::string_view isa) {
  const Kernels* kernels = kernels_for(isa);
  if (kernels == nullptr)
    throw Error(ErrorCode::invalid_argument, "no instruction set '" + std::string(isa) + "' here");
  return *kernels;
}

inline std::string_view view(const py::buffer_info& info) {
  return {static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

}  // namespace farandole
