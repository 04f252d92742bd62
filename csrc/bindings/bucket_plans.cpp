#include "bindings/bucket_plans.h"

namespace farandole {

std::vector<Parameter> parameters_from(const py::list& rows) {
  std::vector<Parameter> parameters;
  for (const py::handle row : rows) {
    const auto fields = row.cast<py::tuple>();
    const auto name = fields[0].cast<std::string>(), dtype = fields[2].cast<std::string>();
    const auto known = dtype_named(dtype);
    if (!known)
      throw Error(ErrorCode::invalid_argument,
                  "parameter '" + name + "' has the unsupported dtype " + dtype);
    parameters.push_back({name, fields[1].cast<size_t>(), *known});
    if (fields.size() > 3) parameters.back().group = fields[3].cast<int>();
  }
  return parameters;
}

py::list rows_of(const std::vector<Bucket>& buckets) {
  py::list list;
  for (const Bucket& b : buckets) {
    py::list placements;
    for (const Placement& p : b.placements)
      placements.append(py::make_tuple(p.parameter, p.offset, p.count));
    list.append(py::make_tuple(std::string(name_of(b.dtype)), b.count, placements));
  }
  return list;
}

}  // namespace farandole
