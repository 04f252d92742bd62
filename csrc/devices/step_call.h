// One call whose arrays lie on a device of this rank: it goes by steps where those of all ranks do,
// else by the host.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "devices/staged_call.h"
#include "devices/steps.h"

namespace farandole {

class StepCall : public OnDevices {
 public:
  /// Null where it has to go by the host on this rank's account alone. `copies`: of the call, which
  /// begin if it goes by the host after all.
  /// Throws Error(invalid_argument) for an `algorithm` of the devices that cannot be.
  static std::shared_ptr<StepCall> offer(Group& group, Options& options, const PlacedArray& input,
                                         const PlacedArray& output,
                                         std::shared_ptr<StagedCopies> copies);

  Backend& backend() override;
  void go_by_host(Operation& operation) override;

  /// Whether it went by steps; once the operation is complete on the host.
  bool launched() const { return arrays_.launched.load(std::memory_order_acquire); }
  /// Then: whoever works on the output finds the result, in what it puts into this stream from now
  /// on. Without one the host waits for the device. Throws the verdict where the ranks have failed
  /// meanwhile.
  void hand_over(std::optional<uint64_t> stream);

 private:
  StepCall(std::shared_ptr<Steps> steps, const Group& group, const Options& options,
           const PlacedArray& input, const PlacedArray& output,
           std::shared_ptr<StagedCopies> copies, uint64_t call);
  void check() const;

  std::shared_ptr<Steps> steps_;
  std::shared_ptr<FailureDetector> detector_;
  int rank_, world_rank_;
  CollectiveSpec spec_;
  PlacedArray input_, output_;
  std::shared_ptr<StagedCopies> copies_;
  uint64_t call_;
  StepArrays arrays_;
};

}  // namespace farandole
