// Options and parameters of training steps by buckets, from Python's terms.
#pragma once

#include <string>
#include <vector>

#include "bindings/bind.h"
#include "fusion/bucket_step.h"

namespace farandole {

/// From rows (name, elements, dtype) or (name, elements, dtype, group).
std::vector<Parameter> parameters_from(const py::list& rows);
/// The plan as rows: (dtype, count, [(parameter, offset, count)…]), in elements.
py::list rows_of(const std::vector<Bucket>& buckets);
BucketOptions bucket_options(const std::string& op, double prescale, double postscale,
                             const BucketLimits& limits, const std::string& label);

}  // namespace farandole
