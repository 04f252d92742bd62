// A collective without its buffers: made once, where it is requested, and passed down.
#pragma once

#include "base/reduce_op.h"
#include "schedule/schedule.h"

namespace farandole {

/// Fields that a collective has no use for are ignored.
struct CollectiveSpec {
  Collective kind = Collective::barrier;
  ReduceOp op = ReduceOp::sum;
  double prescale = 1;
  double postscale = 1;
  int root = 0;

  bool operator==(const CollectiveSpec&) const = default;
};

}  // namespace farandole
