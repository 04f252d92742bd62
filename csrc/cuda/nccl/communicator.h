// One rank's end of a communicator of NCCL's. It never blocks: whatever NCCL does not do at once is
// asked for again. A rank that is lost leaves NCCL's kernels waiting for ever; abort() ends them.
//
// By one thread at a time. NCCL allows its functions to be called by one thread alone, except for
// the abort, which may wait for a kernel to end and has a thread of its own.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <thread>

#include "base/error.h"
#include "cuda/driver/stream.h"
#include "cuda/nccl/nccl_functions.h"
#include "cuda/work.h"

namespace farandole::cuda {

class NcclCommunicator {
 public:
  /// Throws Error(device) where there is no NCCL, or it refuses.
  static CudaNcclId make_id();

  /// Begins to meet the others.
  NcclCommunicator(std::shared_ptr<const DeviceContext> context, const CudaNcclId& id, int rank,
                   int size);
  /// Flushes work that others may still need, unless it was aborted or has failed. Streams are
  /// idle.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Whether what was asked last is done. Throws what NCCL came to.
  bool ready();
  /// Once it is ready; what was run is in the stream when it is ready again.
  void run(const StreamRef& stream, const NcclPlan& plan);
  /// Throws, once, where NCCL has failed meanwhile.
  void look_for_failure();
  void abort() noexcept;

 private:
  /// Throws what a call came to.
  void check(NcclCode code, const char* call);
  Error error_of(NcclCode code, const char* call) const;
  void start(const StreamRef& stream, const CudaNcclCall& call, int type, int op);
  int op_of(const NcclPlan& plan, int dtype);
  bool flush() const;
  void wait_for_abort() noexcept;

  /// The state that a late abort still uses.
  struct Ending {
    std::atomic<bool> done{false};
  };

  std::shared_ptr<const DeviceContext> context_;
  const NcclLibrary& library_;
  NcclHandle handle_ = nullptr;
  const char* asked_ = "ncclCommInitRankConfig";  // last
  std::optional<int> op_;                         // of our own making, until it was run
  bool settled_ = false, failed_ = false, aborted_ = false;
  std::shared_ptr<Ending> ending_;
  std::thread aborting_;
};

}  // namespace farandole::cuda
