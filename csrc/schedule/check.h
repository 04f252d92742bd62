// Proof of a set of schedules, one for each rank, before a byte moves.
#pragma once

#include <span>
#include <string>

#include "schedule/schedule.h"

namespace farandole {

struct Proof {
  std::string problem;        // empty: none; otherwise what, and at which rank, lane and step
  Order order = Order::none;  // what was proved; none with a problem
};

/// Where the buffers lie: two memories, or one as Space describes it.
enum class Buffers : uint8_t { apart, in_place };

/// Executes all ranks' schedules symbolically over channels that buffer nothing: a transfer happens
/// when both its ends stand at it. What is correct so is correct with any buffering.
///
/// Every element carries which element it is, whether it is raw, scaled or finished, and the
/// expression of folds it stands for (operands not exchangeable), so `order` is proved.
/// Reported: deadlock; transfers of unequal length; slices outside their space; send and receive
/// overlapping inside a step; reading what was never set; writing to input; lanes touching each
/// other's data; contributions lost, doubled or of another element; a leaf scaled twice or never;
/// results not finished exactly once; ranks that differ; for a barrier, a rank that leaves too
/// early.
Proof check(Collective collective, const Shape& world, std::span<const Schedule> by_rank,
            Buffers buffers);

/// Both ways, where there are two; the first problem, or the lesser order.
Proof check(Collective collective, const Shape& world, std::span<const Schedule> by_rank);

}  // namespace farandole
