// What is asked of the engine.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/reduce_op.h"
#include "schedule/schedule.h"

namespace farandole {

/// Elements in memory of this process. Sizes are in elements.
struct Buffer {
  std::byte* data = nullptr;
  size_t count = 0;
  DType dtype = DType::float32;

  size_t bytes() const { return count * size_of(dtype); }
};

/// Called once, after the token is released, on whichever thread drove; never takes Python's lock.
using Completion = std::function<void(const Error*)>;

/// One rank's share of a collective. Input and output hold what sizes_of(kind, shape) says
/// (schedule/slicing.h); a rank that reads or gets nothing has an empty buffer there.
struct Operation {
  Collective kind = Collective::barrier;
  Buffer input;
  Buffer output;
  size_t count = 0;            // the shape's, equal on all ranks: what they agree on
  std::vector<size_t> counts;  // the shape's, for uneven forms; empty: equal shares
  ReduceOp op = ReduceOp::sum;
  double prescale = 1;
  double postscale = 1;
  int root = 0;
  std::string name;
  std::string algorithm;  // empty: the engine chooses; else a backend's path or a planner by name
  Determinism level = Determinism::canonical;
  Deadline deadline;
  Duration timeout{};  // besides, from the first look around after it has started; zero: none
  std::shared_ptr<const void> keepalive;
  Completion completion;
};

}  // namespace farandole
