// Plans of buckets.
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "bindings/bucket_steps.h"
#include "core/bindings/bind.h"
#include "fusion/bucket_plan.h"

namespace farandole {

void bind_plans(py::module_& testing) {
  testing.def(
      "plan_buckets",
      [](const py::list& rows, size_t bucket_bytes, size_t first_bucket_bytes,
         const std::optional<std::vector<int>>& ready_order, size_t in_place_bytes) {
        const std::vector<Parameter> parameters = parameters_from(rows);
        const BucketLimits limits{bucket_bytes, first_bucket_bytes, in_place_bytes};
        return rows_of(ready_order ? plan_buckets(parameters, *ready_order, limits)
                                   : plan_buckets(parameters, limits));
      },
      py::arg("parameters"), py::arg("bucket_bytes"), py::arg("first_bucket_bytes"),
      py::arg("ready_order") = py::none(), py::arg("in_place_bytes") = BucketLimits{}.alone_bytes);
  testing.def(
      "launch_point",
      [](const py::list& rows, size_t bucket_bytes, size_t first_bucket_bytes,
         const std::vector<int>& planned_order, const std::vector<int>& ready_order) {
        const std::vector<Parameter> parameters = parameters_from(rows);
        return launch_point(
            parameters, plan_buckets(parameters, planned_order, {bucket_bytes, first_bucket_bytes}),
            ready_order);
      },
      py::arg("parameters"), py::arg("bucket_bytes"), py::arg("first_bucket_bytes"),
      py::arg("planned_order"), py::arg("ready_order"));
  testing.def(
      "plan_fingerprint",
      [](const py::list& rows, size_t bucket_bytes, size_t first_bucket_bytes) {
        const std::vector<Parameter> parameters = parameters_from(rows);
        return fingerprint(parameters,
                           plan_buckets(parameters, {bucket_bytes, first_bucket_bytes}));
      },
      py::arg("parameters"), py::arg("bucket_bytes"), py::arg("first_bucket_bytes"));
}

}  // namespace farandole
