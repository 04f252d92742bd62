// An optimizer's update, and norms, of bytes.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "core/bindings/bind.h"
#include "core/bindings/kernels.h"
#include "fusion/update_rule.h"

namespace farandole {
namespace {

/// New value and new state of the `step`-th update.
py::tuple py_update(const std::string& optimizer, const std::string& dtype, const py::buffer& value,
                    const py::buffer& gradient, const std::vector<py::buffer>& state,
                    const HyperParameters& h, int64_t step, double factor, const std::string& isa) {
  const Optimizer which = optimizer_named(optimizer).value();
  const DType type = dtype_named(dtype).value();
  const UpdateKind kind = kind_of(which, h);
  if (!can_update(type) || state.size() < slots_of(kind))
    throw Error(ErrorCode::invalid_argument, "wrong dtype, or too little state");
  std::string values(view(value.request()));
  std::vector<std::string> slots;
  for (const py::buffer& s : state) slots.emplace_back(view(s.request()));
  const py::buffer_info g = gradient.request();
  const auto bytes_of = [](std::string& s) { return reinterpret_cast<std::byte*>(s.data()); };
  UpdateArrays arrays{
      bytes_of(values), static_cast<const std::byte*>(g.ptr), {}, values.size() / size_of(type)};
  for (size_t s = 0; s < slots.size(); ++s) arrays.state[s] = bytes_of(slots[s]);
  kernels_named(isa).update[static_cast<size_t>(type)][static_cast<size_t>(kind)](
      arrays, factors_for(which, h, step, factor));
  py::tuple result(1 + slots.size());
  result[0] = py::bytes(values);
  for (size_t s = 0; s < slots.size(); ++s) result[s + 1] = py::bytes(slots[s]);
  return result;
}

double py_norm(const std::string& kind, const std::string& dtype, const py::buffer& elements) {
  const DType type = dtype_named(dtype).value();
  const py::buffer_info info = elements.request();
  const auto* data = static_cast<const std::byte*>(info.ptr);
  const auto count = static_cast<size_t>(info.size);
  return kind == "2" ? sum_of_squares(data, count, type) : largest_magnitude(data, count, type);
}

}  // namespace

void bind_updates(py::module_& testing) {
  testing.def("update", &py_update, py::arg("optimizer"), py::arg("dtype"), py::arg("value"),
              py::arg("gradient"), py::arg("state"), py::arg("hyper"), py::arg("step"),
              py::arg("factor") = 1.0, py::kw_only(), py::arg("isa"));
  testing.def("norm", &py_norm, py::arg("kind"), py::arg("dtype"), py::arg("elements"));
}

}  // namespace farandole
