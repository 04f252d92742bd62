#include "devices/nccl_plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "fold/fold.h"
#include "schedule/planners.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

// The dtypes and operations of NCCL (cuda/nccl/communicator.cpp has their numbers). One that is
// added to ours takes other paths until it is listed here.
constexpr DType kNcclDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64,
                                 DType::int8,    DType::uint8,    DType::int32,   DType::uint32,
                                 DType::int64,   DType::uint64};
constexpr ReduceOp kNcclOps[] = {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max,
                                 ReduceOp::product};

bool is_floating(DType dtype) {
  const DTypeKind kind = row(dtype).kind;
  return kind == DTypeKind::floating || kind == DTypeKind::half;
}

bool is_scaled(const CollectiveSpec& spec) {
  return spec.op == ReduceOp::mean || spec.prescale != 1 || spec.postscale != 1;
}

/// Whether the ranks' shares are equal: NCCL has no uneven forms, but for messages.
bool has_equal_shares(Collective kind, const Shape& shape) {
  const size_t first = share_of(kind, shape, 0).count;
  for (int r = 1; r < shape.size; ++r)
    if (share_of(kind, shape, r).count != first) return false;
  return true;
}

struct Planning {
  const Shape& shape;
  uint64_t input, output;
  size_t unit;     // bytes of an element
  size_t counted;  // elements of NCCL's in one of ours
  NcclPlan& plan;

  void add(CudaNcclWhat what, int peer, size_t from, size_t to, size_t count) const {
    if (count > 0)
      plan.calls.push_back({what, peer, input + from * unit, output + to * unit, count * counted});
  }
  void reduce_scatter() const {
    const auto share = [&](int r) { return share_of(Collective::reduce_scatter, shape, r); };
    if (has_equal_shares(Collective::reduce_scatter, shape))
      return add(kNcclReduceScatter, 0, 0, 0, share(0).count);
    for (int r = 0; r < shape.size; ++r) add(kNcclReduce, r, share(r).offset, 0, share(r).count);
  }
  void all_gather() const {
    const auto share = [&](int r) { return share_of(Collective::all_gather, shape, r); };
    if (has_equal_shares(Collective::all_gather, shape))
      return add(kNcclAllGather, 0, 0, 0, share(0).count);
    for (int r = 0; r < shape.size; ++r) add(kNcclBroadcast, r, 0, share(r).offset, share(r).count);
  }
  /// The root's end or a member's. The root sends to itself, too.
  void gather() const {
    const auto share = [&](int r) { return share_of(Collective::gather, shape, r); };
    add(kNcclSend, shape.root, 0, 0, share(shape.rank).count);
    for (int r = 0; shape.rank == shape.root && r < shape.size; ++r)
      add(kNcclReceive, r, 0, share(r).offset, share(r).count);
  }
  void scatter() const {
    const auto share = [&](int r) { return share_of(Collective::scatter, shape, r); };
    for (int r = 0; shape.rank == shape.root && r < shape.size; ++r)
      add(kNcclSend, r, share(r).offset, 0, share(r).count);
    add(kNcclReceive, shape.root, 0, 0, share(shape.rank).count);
  }
  void all_to_all() const {
    for (int r = 0; r < shape.size; ++r) {
      const Slice sent = block_sent(shape, shape.rank, r);
      const Slice received = block_received(shape, r, shape.rank);
      add(kNcclSend, r, sent.offset, 0, sent.count);
      add(kNcclReceive, r, 0, received.offset, received.count);
    }
  }
};

}  // namespace

std::string why_not_by_nccl(const CollectiveSpec& spec, DType dtype) {
  if (std::ranges::find(kNcclDTypes, dtype) == std::end(kNcclDTypes))
    return "NCCL folds no " + std::string(name_of(dtype));
  if (std::ranges::find(kNcclOps, spec.op) == std::end(kNcclOps))
    return "NCCL has no " + std::string(name_of(spec.op));
  if (!is_scaled(spec)) return "";
  if (spec.op != ReduceOp::sum && spec.op != ReduceOp::mean)
    return "NCCL scales sums and means alone, and this is a " + std::string(name_of(spec.op));
  if (!is_floating(dtype)) return "NCCL does not scale integers as the host does";
  return "";
}

NcclPlan nccl_plan(const CollectiveSpec& spec, const Shape& shape, DType dtype, uint64_t input,
                   uint64_t output, bool scales_results) {
  NcclPlan plan;
  const bool folding = folds(spec.kind);
  if (folding) {
    plan.dtype = dtype;
    plan.op = spec.op == ReduceOp::mean ? ReduceOp::sum : spec.op;
    const Scales scales = scales_for(dtype, spec.op, spec.prescale, spec.postscale, shape.size);
    plan.factor = scales.leaf.factor;
    plan.finish = scales.finish.factor;
    if (!scales_results) plan.factor *= std::exchange(plan.finish, 1);
  }
  const size_t bytes = size_of(dtype);
  const Planning planning{shape, input, output, bytes, folding ? 1 : bytes, plan};
  switch (spec.kind) {
    case Collective::all_reduce:
      planning.add(kNcclAllReduce, 0, 0, 0, shape.count);
      break;
    case Collective::reduce_scatter:
      planning.reduce_scatter();
      break;
    case Collective::all_gather:
      planning.all_gather();
      break;
    case Collective::broadcast:
      planning.add(kNcclBroadcast, shape.root, 0, 0, shape.count);
      break;
    case Collective::reduce:
      planning.add(kNcclReduce, shape.root, 0, 0, shape.count);
      break;
    case Collective::gather:
      planning.gather();
      break;
    case Collective::scatter:
      planning.scatter();
      break;
    default:
      planning.all_to_all();
  }
  return plan;
}

}  // namespace farandole
