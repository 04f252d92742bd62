// Whether ranks have the same weights.
#include <pybind11/stl.h>

#include "base/checksum.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "fusion/weights.h"

namespace farandole {
namespace {

std::vector<uint64_t> checksums(const std::vector<py::object>& arrays) {
  std::vector<Borrowed> borrowed;
  for (const py::object& array : arrays) borrowed.push_back(borrow(array, false, "array"));
  std::vector<uint64_t> sums;
  const py::gil_scoped_release unlocked;
  for (const Borrowed& each : borrowed)
    sums.push_back(checksum({each.buffer.data, each.buffer.bytes()}));
  return sums;
}

py::object weights_error(const std::vector<std::string>& names,
                         const std::vector<std::pair<int, std::vector<uint64_t>>>& given,
                         uint64_t step, uint64_t equal_before, const std::string& line) {
  std::vector<WeightsRow> rows;
  for (const auto& [rank, sums] : given) {
    if (sums.size() != names.size())
      throw Error(ErrorCode::invalid_argument, "a checksum for each parameter");
    rows.push_back({rank, sums});
  }
  const auto error = difference_of_weights(names, rows, {step, equal_before, line});
  return error ? python_error(*error) : py::none();
}

}  // namespace

void bind_weights(py::module_& module) {
  using namespace py::literals;
  module.def("checksums", &checksums, "arrays"_a,
             "A checksum of each array's bits, of 64 bits. Without Python's lock.");
  module.def("weights_error", &weights_error, "names"_a, "rows"_a, "step"_a, "equal_before"_a,
             "line"_a,
             "The Mismatch that says how the ranks' parameters differ, by (rank, checksums); None "
             "where they do not.");
}

}  // namespace farandole
