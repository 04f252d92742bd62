// Sharded optimizer steps.
#include <pybind11/stl.h>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/bucket_steps.h"
#include "bindings/waiting.h"
#include "fusion/sharded_update.h"

namespace farandole {
namespace {

std::shared_ptr<ShardedUpdate> make_update(std::shared_ptr<Group> group, const py::list& rows,
                                           const std::string& optimizer, size_t slots,
                                           const std::string& op, double prescale, double postscale,
                                           size_t bucket_bytes, size_t first_bucket_bytes,
                                           const std::string& label) {
  refuse_in_child();
  const auto known_optimizer = optimizer_named(optimizer);
  if (!known_optimizer)
    throw Error(ErrorCode::invalid_argument, "optimizer '" + optimizer + "' is unknown");
  std::vector<Parameter> parameters = parameters_from(rows);
  if (slots > kMostSlots) throw Error(ErrorCode::invalid_argument, "at most 2 slots");
  const ShardedOptions options{
      bucket_options(op, prescale, postscale, {bucket_bytes, first_bucket_bytes}, label),
      *known_optimizer, slots};
  const py::gil_scoped_release unlocked;
  return std::make_shared<ShardedUpdate>(std::move(group), std::move(parameters), options,
                                         look_for_signals);
}

ShardedUpdate::Task task_named(const std::string& name) {
  if (name == "update") return ShardedUpdate::Task::update;
  if (name == "norm 2") return ShardedUpdate::Task::norm_two;
  if (name == "norm inf") return ShardedUpdate::Task::norm_infinite;
  throw Error(ErrorCode::invalid_argument, "task '" + name + "' is unknown");
}

std::byte* pointer(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

void bind_hyper_parameters(py::module_& module) {
  py::class_<HyperParameters>(module, "HyperParameters",
                              "An optimizer's settings for one group of parameters.")
      .def(py::init([](double rate, double weight_decay, double momentum, double dampening,
                       double beta1, double beta2, double epsilon, bool nesterov, bool decoupled,
                       bool maximize) {
             return HyperParameters{rate,  weight_decay, momentum, dampening, beta1,
                                    beta2, epsilon,      nesterov, decoupled, maximize};
           }),
           py::kw_only(), py::arg("rate"), py::arg("weight_decay") = 0.0, py::arg("momentum") = 0.0,
           py::arg("dampening") = 0.0, py::arg("beta1") = 0.0, py::arg("beta2") = 0.0,
           py::arg("epsilon") = 0.0, py::arg("nesterov") = false, py::arg("decoupled") = false,
           py::arg("maximize") = false);
}

void bind_sharded_update(py::module_& module) {
  py::class_<ShardedUpdate, BucketStep, std::shared_ptr<ShardedUpdate>>(
      module, "ShardedUpdate", "An optimizer's step where every rank updates 1/n of each bucket.",
      kEndsUnlocked)
      .def(py::init(&make_update), py::arg("group"), py::arg("parameters"), py::arg("optimizer"),
           py::arg("slots"), py::arg("op") = "mean", py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("bucket_bytes"), py::arg("first_bucket_bytes"),
           py::arg("label") = "gradients")
      .def(
          "take",
          [](ShardedUpdate& u, size_t parameter, uintptr_t gradient) {
            u.take(parameter, pointer(gradient));
          },
          py::arg("parameter"), py::arg("gradient"), kUnlocked)
      .def(
          "begin",
          [](ShardedUpdate& u, const std::string& task, const py::bytes& present,
             std::vector<HyperParameters> groups, std::vector<int> group_of, double factor) {
            refuse_in_child();
            const auto flags = std::string_view(present);
            if (flags.size() != u.places().size())
              throw Error(ErrorCode::invalid_argument, "`present` has a byte for each parameter");
            u.begin(task_named(task), {flags.begin(), flags.end()}, std::move(groups),
                    std::move(group_of), factor);
          },
          py::arg("task"), py::arg("present"), py::arg("groups"), py::arg("group_of"),
          py::arg("factor") = 1.0)
      .def_property_readonly("norm", &ShardedUpdate::norm)
      .def_property_readonly("slots", &ShardedUpdate::slots)
      .def_property_readonly("state_bytes", &ShardedUpdate::state_bytes)
      .def_readwrite("steps", &ShardedUpdate::steps)
      .def(
          "gather_state",
          [](ShardedUpdate& u, size_t bucket, size_t slot, uintptr_t whole) {
            u.gather_state(bucket, slot, pointer(whole));
          },
          py::arg("bucket"), py::arg("slot"), py::arg("whole"), kUnlocked)
      .def(
          "set_state",
          [](ShardedUpdate& u, size_t bucket, size_t slot, uintptr_t whole) {
            u.set_state(bucket, slot, pointer(whole));
          },
          py::arg("bucket"), py::arg("slot"), py::arg("whole"))
      .def("reset_state", &ShardedUpdate::reset_state, py::arg("parameters"))
      .def("values", [](const ShardedUpdate& u, size_t bucket) {
        return std::make_shared<SharedMemory>(
            SharedMemory{u.values(bucket), u.buckets()[bucket].bytes()});
      });
}

}  // namespace

void bind_update(py::module_& module) {
  bind_hyper_parameters(module);
  bind_sharded_update(module);
}

}  // namespace farandole
