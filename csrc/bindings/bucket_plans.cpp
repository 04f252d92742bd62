#include "bindings/bucket_plans.h"

namespace farandole {

std::vector<Parameter> parameters_from(const py::list& rows) {
  std::vector<Parameter> parameters;
  for (const py::handle row : rows) {
    const auto [name, count, dtype] = row.cast<std::tuple<std::string, size_t, std::string>>();
    const auto known = dtype_named(dtype);
    if (!known)
      throw Error(ErrorCode::invalid_argument,
                  "parameter '" + name + "' has the unsupported dtype " + dtype);
    parameters.push_back({name, count, *known});
  }
  return parameters;
}

py::list rows_of(const std::vector<Bucket>& buckets) {
  py::list list;
  for (const Bucket& b : buckets) {
    py::list items;
    for (const Placement& p : b.items) items.append(py::make_tuple(p.parameter, p.offset, p.count));
    list.append(py::make_tuple(std::string(name_of(b.dtype)), b.count, items));
  }
  return list;
}

}  // namespace farandole
