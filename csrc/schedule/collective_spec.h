// What a collective is, besides its buffers: made once, where it is asked for, and carried down.
#pragma once

#include "base/reduce_op.h"
#include "schedule/schedule.h"

namespace farandole {

/// What a collective has no use for is ignored.
struct CollectiveSpec {
  Collective kind = Collective::barrier;
  ReduceOp op = ReduceOp::sum;
  double prescale = 1;
  double postscale = 1;
  int root = 0;

  bool operator==(const CollectiveSpec&) const = default;
};

}  // namespace farandole
