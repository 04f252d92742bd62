// What farandole.cuda tells of this process's devices.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "cuda/driver/device.h"
#include "cuda/exchange/kernel_image.h"
#include "devices/library.h"

namespace farandole {
namespace {

py::dict described(const cuda::Driver& driver, const cuda::DeviceProperties& device) {
  std::string unfit = device.why_unfit();
  if (unfit.empty()) unfit = cuda::why_not_loaded(cuda::kernel_build(), driver.version(), device);
  py::dict all;
  all["ordinal"] = device.ordinal;
  all["name"] = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      device.name.data(), static_cast<Py_ssize_t>(device.name.size()), "replace"));
  all["uuid"] = device.uuid_text();
  all["bus_id"] = device.bus_id;
  all["capability"] = std::pair(device.capability / 10, device.capability % 10);
  all["memory_bytes"] = device.memory_bytes;
  all["multiprocessors"] = device.multiprocessors;
  all["is_instance"] = device.instance;
  all["exports_memory"] = device.descriptors;
  all["folds_by_switch"] = device.multicast;
  all["unfit"] = unfit;
  return all;
}

std::shared_ptr<const cuda::Driver> driver_of_process() {
  const py::gil_scoped_release unlocked;  // it may take seconds to begin
  return cuda::Driver::of_process();
}

py::list devices() {
  const auto driver = driver_of_process();
  std::vector<cuda::DeviceProperties> found;
  {
    const py::gil_scoped_release unlocked;
    found = cuda::all_devices(*driver);
  }
  py::list all;
  for (const cuda::DeviceProperties& device : found) all.append(described(*driver, device));
  return all;
}

/// `find()` gives the setting and the wheel's path.
void look_for_nccl(py::object find) {
  // Never freed: frameworks' threads may outlive the interpreter.
  look_for_nccl_by([held = find.release().ptr()]() -> cuda::NcclPlaces {
    const py::gil_scoped_acquire locked;
    try {
      const py::object places = py::reinterpret_borrow<py::object>(held)();
      auto [setting, wheel] = places.cast<std::pair<std::string, std::string>>();
      return {std::move(setting), std::move(wheel)};
    } catch (py::error_already_set& error) {
      throw Error(ErrorCode::device, py::str(error.value()));
    }
  });
}

const cuda::NcclLibrary& opened_nccl(std::string setting, std::string wheel) {
  const py::gil_scoped_release unlocked;
  cuda::NcclLibrary::look_in({std::move(setting), std::move(wheel)});
  return cuda::NcclLibrary::of_process();
}

/// Paths are bytes, as the file system has them.
std::pair<int, py::bytes> nccl_library(std::string setting, std::string wheel) {
  const cuda::NcclLibrary& library = opened_nccl(std::move(setting), std::move(wheel));
  return {library.version, library.file};
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("cuda_driver_version", [] { return driver_of_process()->version(); });
  module.def("cuda_devices", devices, "The arguments of farandole.cuda.Device, for each.");
  module.def(
      "kernel_compiler", [] { return cuda::kernel_build().nvcc; },
      "The version of CUDA whose nvcc or NVRTC has made the kernels, 12090 of 12.9; 0: none.");
  module.def("look_for_nccl_by", look_for_nccl, py::arg("find"),
             "`find()` gives FARANDOLE_NCCL and where PyPI's package has the library, or an empty "
             "text. It is called when the first array on a device is met.");
  module.def("nccl_library", nccl_library, py::arg("setting"), py::arg("wheel"),
             "The version of the NCCL that is found there, and its file.");
}

}  // namespace farandole
