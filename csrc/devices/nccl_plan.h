// The NCCL calls of a collective, and the collectives that NCCL cannot run: pure arithmetic, the
// same on all ranks but for a rank's own addresses and shares.
#pragma once

#include <string>

#include "base/dtype.h"
#include "cuda/work.h"
#include "schedule/collective_spec.h"

namespace farandole {

/// Why NCCL cannot fold this, as one clause; empty: it can. `spec` folds.
std::string why_not_by_nccl(const CollectiveSpec& spec, DType dtype);

/// A collective of `has_steps()`, whose arrays begin at these addresses. `scales_results`: else all
/// factors are of inputs, by NCCL.
NcclPlan nccl_plan(const CollectiveSpec& spec, const Shape& shape, DType dtype, uint64_t input,
                   uint64_t output, bool scales_results);

}  // namespace farandole
