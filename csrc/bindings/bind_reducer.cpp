// Gradient buckets.
#include <pybind11/stl.h>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/bucket_steps.h"
#include "bindings/waiting.h"
#include "fusion/reducer.h"

namespace farandole {
namespace {
constexpr size_t kNeverAlone = BucketLimits{}.alone_bytes;
}  // namespace

void bind_reducer(py::module_& module) {
  py::class_<Reducer, BucketStep, std::shared_ptr<Reducer>>(
      module, "Reducer", "Reduces a training step's gradients in buckets during backward.",
      kEndsUnlocked)
      .def(py::init([](std::shared_ptr<Group> group, const py::list& rows, const std::string& op,
                       double prescale, double postscale, size_t bucket_bytes,
                       size_t first_bucket_bytes, size_t in_place_bytes, bool overlap,
                       const std::string& label, bool sparse_as_dense) {
             refuse_in_child();
             const ReducerOptions options{
                 bucket_options(op, prescale, postscale,
                                {bucket_bytes, first_bucket_bytes, in_place_bytes}, label),
                 overlap, sparse_as_dense};
             std::vector<Parameter> parameters = parameters_from(rows);
             const py::gil_scoped_release unlocked;
             return std::make_shared<Reducer>(std::move(group), std::move(parameters), options,
                                              look_for_signals);
           }),
           py::arg("group"), py::arg("parameters"), py::arg("op") = "mean",
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("bucket_bytes"),
           py::arg("first_bucket_bytes"), py::arg("in_place_bytes") = kNeverAlone,
           py::arg("overlap") = true, py::arg("label") = "gradients",
           py::arg("sparse_as_dense") = false)
      .def(
          "mark_ready",
          [](Reducer& r, int parameter, uintptr_t gradient, int sparse_dims) {
            r.mark_ready(parameter, reinterpret_cast<const std::byte*>(gradient), sparse_dims);
          },
          py::arg("parameter"), py::arg("gradient"), py::arg("sparse_dims") = 0, kUnlocked)
      .def(
          "lend",
          [](Reducer& r, int parameter, uintptr_t gradient, const py::object& owner,
             int sparse_dims) {
            refuse_in_child();
            std::shared_ptr<const void> kept = keep(owner, py::none());
            const py::gil_scoped_release unlocked;
            r.lend(parameter, reinterpret_cast<std::byte*>(gradient), std::move(kept), sparse_dims);
          },
          py::arg("parameter"), py::arg("gradient"), py::arg("owner"), py::arg("sparse_dims") = 0)
      .def("in_place", &Reducer::in_place, py::arg("parameter"))
      .def("launch_rest", &Reducer::launch_rest, kUnlocked)
      .def_property_readonly("has_better_plan", &Reducer::has_better_plan)
      .def("take_better_plan", &Reducer::take_better_plan, kUnlocked)
      .def("describe", &Reducer::describe)
      .def("show_settings", &Reducer::show_settings, py::arg("settings"))
      .def_property_readonly("settings_differ", &Reducer::settings_differ)
      .def("note_update", &Reducer::note_update)
      .def("count_updates_anew", &Reducer::count_updates_anew)
      .def("used", &Reducer::used, py::arg("parameter"))
      .def("sparse_dims", &Reducer::sparse_dims, py::arg("parameter"))
      .def_property_readonly("left_out",
                             [](const Reducer& r) {
                               py::dict dims;
                               for (size_t i = 0; i < r.left_out().size(); ++i)
                                 if (r.left_out()[i] > 0) dims[py::int_(i)] = r.left_out()[i];
                               return dims;
                             })
      .def_property_readonly("key", &Reducer::key);
}

}  // namespace farandole
