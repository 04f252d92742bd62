// How Python calls training steps by buckets.
#pragma once

#include <string>
#include <vector>

#include "bindings/bind.h"
#include "engine/fork.h"
#include "fusion/bucket_step.h"

namespace farandole {

/// For functions that run without Python's lock, and in no forked child.
struct NotInChild {
  NotInChild() { refuse_in_child(); }
};
inline constexpr py::call_guard<NotInChild, py::gil_scoped_release> kUnlocked{};

/// From rows (name, elements, dtype) or (name, elements, dtype, group).
std::vector<Parameter> parameters_from(const py::list& rows);
/// The plan as rows: (dtype, count, [(parameter, offset, count)…]), in elements.
py::list rows_of(const std::vector<Bucket>& buckets);
BucketOptions bucket_options(const std::string& op, double prescale, double postscale,
                             const BucketLimits& limits, const std::string& label);

}  // namespace farandole
