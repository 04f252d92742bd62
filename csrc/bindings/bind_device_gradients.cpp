// Gradients on a device.
#include <pybind11/stl.h>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/bucket_steps.h"
#include "bindings/device_arrays.h"
#include "bindings/waiting.h"
#include "devices/device_gradients.h"
#include "devices/device_shards.h"
#include "engine/fork.h"

namespace farandole {
namespace {

/// Makes a carrier of a step's gradients on a device.
template <typename Made, typename Step>
std::shared_ptr<Made> carry(Step& step, int device, std::vector<bool> carried) {
  refuse_in_child();
  require_cuda("a parameter");
  if (carried.size() != step.parameters().size())
    throw Error(ErrorCode::invalid_argument, "`carried` has a value for each parameter");
  const py::gil_scoped_release unlocked;
  auto made = std::make_shared<Made>(step, device, std::move(carried));
  step.add_carrier(made);
  return made;
}

void bind_device_shards(py::module_& module) {
  py::class_<DeviceShards, std::shared_ptr<DeviceShards>>(
      module, "DeviceShards",
      "A sharded update's parameters on a device: updated there, or brought to its buckets and "
      "back. `carried`: by parameter, whether it lies there.",
      kEndsUnlocked)
      .def(py::init(&carry<DeviceShards, ShardedUpdate>), py::arg("update"), py::arg("device"),
           py::arg("carried"), py::keep_alive<1, 2>())
      .def(
          "bring",
          [](DeviceShards& s, size_t parameter, uintptr_t gradient, uint64_t stream,
             const py::object& owner) {
            refuse_in_child();
            std::shared_ptr<const void> kept = keep(owner, py::none());
            const py::gil_scoped_release unlocked;
            s.bring(parameter, gradient, stream, std::move(kept));
          },
          py::arg("parameter"), py::arg("gradient"), py::arg("stream"), py::arg("owner"),
          "In place of take(): contiguous elements on the device, which are made in `stream`.")
      .def("bring_value", &DeviceShards::bring_value, py::arg("parameter"), py::arg("value"),
           py::arg("stream"), kUnlocked, "Before an update: where a parameter is.")
      .def(
          "take_back",
          [](DeviceShards& s, const std::vector<std::pair<size_t, uintptr_t>>& values,
             uint64_t stream) { s.take_back(values, stream); },
          py::arg("values"), py::arg("stream"), kUnlocked,
          "After an update: what was updated, and where it is. What is put into `stream` from now "
          "on finds it there.");
}

}  // namespace

void bind_device_gradients(py::module_& module) {
  bind_device_shards(module);
  py::class_<DeviceGradients, std::shared_ptr<DeviceGradients>>(
      module, "DeviceGradients",
      "Has a device's gradients reduced: where they lie, or in a reducer's buckets. `carried`: by "
      "parameter, whether its gradients lie there.",
      kEndsUnlocked)
      .def(py::init(&carry<DeviceGradients, Reducer>), py::arg("reducer"), py::arg("device"),
           py::arg("carried"), py::keep_alive<1, 2>())
      .def(
          "bring",
          [](DeviceGradients& g, int parameter, uintptr_t gradient, uint64_t stream,
             const py::object& owner, int sparse_dims) {
            refuse_in_child();
            std::shared_ptr<const void> kept = keep(owner, py::none());
            const py::gil_scoped_release unlocked;
            g.bring(parameter, gradient, stream, std::move(kept), sparse_dims);
          },
          py::arg("parameter"), py::arg("gradient"), py::arg("stream"), py::arg("owner"),
          py::arg("sparse_dims") = 0,
          "In place of mark_ready: contiguous elements on the device, which are made in `stream`.")
      .def(
          "take_back",
          [](DeviceGradients& g, const std::vector<int>& parameters, uint64_t stream) {
            refuse_in_child();
            {
              const py::gil_scoped_release unlocked;
              g.take_back(parameters, stream);
            }
            drop_released();
          },
          py::arg("parameters"), py::arg("stream"),
          "After wait(): reduced gradients are where they came from, before what is put into "
          "`stream` from now on.");
}

}  // namespace farandole
