// The NCCL calls of a collective, and the collectives that NCCL cannot run: pure arithmetic, the
// same on all ranks but for a rank's own addresses and shares.
#pragma once

#include <string>
#include <vector>

#include "base/cuda_table.h"
#include "base/dtype.h"
#include "schedule/collective_spec.h"

namespace farandole {

/// Why NCCL cannot fold this, as one clause; empty: it can. `spec` folds.
std::string why_not_by_nccl(const CollectiveSpec& spec, DType dtype);

struct NcclPlan {
  std::vector<CudaNcclCall> calls;
  DType dtype = DType::uint8;  // bytes, where nothing is folded
  ReduceOp op = ReduceOp::sum;
  double factor = 1;  // of every input
  double finish = 1;  // of every result
};

/// A collective of `has_steps()`, whose arrays begin at these addresses. `scales_results`: else all
/// factors are of inputs, by NCCL.
NcclPlan nccl_plan(const CollectiveSpec& spec, const Shape& shape, DType dtype, uint64_t input,
                   uint64_t output, bool scales_results);

}  // namespace farandole
