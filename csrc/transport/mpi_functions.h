// Calls to an MPI that is not known at compile time: functions are looked up in the library that
// mpi4py is linked to, and mpi4py gives the handles. There are two kinds of handles: integers of 4
// bytes (MPICH and its family) and pointers (Open MPI; the ABI of MPI 5).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace farandole {

/// Facts from mpi4py: MPI.__file__, and MPI._sizeof() and MPI._handleof() of the objects named.
struct MpiBinding {
  std::string module;
  size_t handle_bytes = 0;
  size_t status_bytes = 0;
  uint64_t byte = 0;      // MPI_BYTE
  uint64_t self = 0;      // MPI_COMM_SELF
  uint64_t world = 0;     // MPI_COMM_WORLD
  uint64_t returns = 0;   // MPI_ERRORS_RETURN
  uint64_t in_place = 0;  // MPI_IN_PLACE, an address
  // By dtype and by operation: MPI_FLOAT, MPI_SUM …; none where MPI has no such thing.
  std::array<std::optional<uint64_t>, kDTypes.size()> dtypes{};
  std::array<std::optional<uint64_t>, kReduceOps.size()> ops{};
  uint64_t communicator = 0;  // in which ranks exchange bytes
};

/// The tag of frames, and the range of tags for bytes that go straight to their place. Every MPI
/// has tags up to 32767 at least.
inline constexpr int kMpiFrames = 7077;
inline constexpr int kMpiFirstPlace = 8192, kMpiPlaces = 16384;

/// A transfer that has begun; its bytes stay in place until test() has said that it is complete.
struct MpiRequest {
  uint64_t handle = 0;
};

/// Nothing here waits. Any call may throw Error(link).
class MpiFunctions {
 public:
  virtual ~MpiFunctions() = default;
  virtual MpiRequest send(std::span<const std::byte> bytes, int to, int tag = kMpiFrames) = 0;
  virtual MpiRequest receive(std::span<std::byte> into, int from, int tag = kMpiFrames) = 0;
  /// Whether it is complete; then it must not be tested again. `bytes`: how many were received.
  virtual bool test(MpiRequest& request, size_t* bytes = nullptr) = 0;
  /// A receive ends soon, with or without bytes.
  virtual void cancel(MpiRequest& request) = 0;

  // ---- MPI's own all-reduce ----

  /// Whether MPI has this type and this operation.
  virtual bool folds(DType dtype, ReduceOp op) const = 0;
  /// Begins to make a duplicate of the communicator: all ranks do, one after the other. `made` must
  /// not move until the request is complete and adopt() has made it a handle, whose errors return.
  virtual MpiRequest duplicate(uint64_t& made) = 0;
  virtual void adopt(uint64_t& made) = 0;
  /// Begins an all-reduce of `count` elements that folds() accepts, in a duplicate. All ranks begin
  /// theirs in the same order. The output may be the input.
  virtual MpiRequest all_reduce(const std::byte* input, std::byte* output, size_t count,
                                DType dtype, ReduceOp op, uint64_t communicator) = 0;

  /// From now on `act` is called as the first thing that MPI_Finalize does.
  virtual void at_finalize(void (*act)()) = 0;
};

/// How MPI ends in this process, for the code that has initialized it.
class MpiExit {
 public:
  virtual ~MpiExit() = default;
  virtual bool is_finalized() = 0;
  virtual void finalize() = 0;       // waits for all ranks
  virtual void abort(int code) = 0;  // ends all ranks; mpiexec's exit code is this one
};

/// Both throw Error(link) where a function is not found.
std::unique_ptr<MpiFunctions> bind_mpi(const MpiBinding& binding);
std::unique_ptr<MpiExit> bind_mpi_exit(const MpiBinding& binding);

}  // namespace farandole
