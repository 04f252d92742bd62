// An all-reduce by MPI itself, as the port sees it: see the note in transport/mpi_port.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "transport/mpi_functions.h"

namespace farandole {

/// One of a communicator's duplicates, in which all-reduces follow each other.
struct MpiDuplicate {
  uint64_t handle = 0;
  MpiRequest request{};  // makes it
  bool ready = false;
  uint32_t begun = 0;  // all-reduces; counts on from world to world
};

/// The duplicates of one communicator. They never move in memory, as MPI writes their handles.
using MpiDuplicates = std::deque<MpiDuplicate>;

/// This process' duplicates, by the communicator's handle.
std::shared_ptr<MpiDuplicates> mpi_duplicates_of(uint64_t communicator);

struct MpiReduction {
  enum class Stage : uint8_t { waiting, begun, complete };

  size_t communicator = 0;           // number of the duplicate
  const std::byte* input = nullptr;  // may be the output
  std::byte* output = nullptr;
  size_t count = 0;  // elements
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;

  Stage stage = Stage::waiting;
  MpiRequest request{};
  bool told = false;  // the others, that it has begun
  TimePoint ends_since{};
};

/// An all-reduce in which this rank takes part only so that it ends on other ranks.
struct MpiJoined {
  MpiReduction reduction;
  std::unique_ptr<std::byte[]> memory;
};

}  // namespace farandole
