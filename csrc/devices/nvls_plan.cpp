#include "devices/nvls_plan.h"

#include <algorithm>
#include <iterator>

namespace farandole {
namespace {

// As kernels/multimem.h has them.
constexpr DType kNvlsDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64,
                                 DType::int32,   DType::uint32,   DType::int64,   DType::uint64};

}  // namespace

std::string why_not_by_nvls(const CollectiveSpec& spec, DType dtype) {
  if (spec.kind != Collective::all_reduce) return "runs all_reduce alone";
  if (std::ranges::find(kNvlsDTypes, dtype) == std::end(kNvlsDTypes))
    return "NVLS folds no " + std::string(name_of(dtype));
  if (spec.op == ReduceOp::sum || spec.op == ReduceOp::mean) return "";
  const bool is_larger = spec.op == ReduceOp::min || spec.op == ReduceOp::max;
  if (is_larger && row(dtype).kind == DTypeKind::integer) return "";
  return "NVLS has no " + std::string(name_of(spec.op)) + " of " + std::string(name_of(dtype));
}

}  // namespace farandole
