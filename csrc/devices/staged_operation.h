// One operation of which arrays lie on devices: by steps where those of all ranks do, else staged
// on the host, packed if they are several, and in pieces if one is long.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "devices/piece_call.h"
#include "devices/staged_arrays.h"
#include "devices/step_call.h"

namespace farandole {

class StagedOperation {
 public:
  /// Its copies are the gate of the operation that is submitted with these options.
  StagedOperation(Group& group, Options& options) : copies_(copies_for(group, options)) {}

  /// Returns the operand to submit, and sets options to match: the arrays where they are, if they
  /// may go by steps or go in pieces, else their memory on the host, with the copies begun.
  /// `stream`: as StepCall's.
  Operand offer(Group& group, const std::vector<PlacedOperand>& arrays, Options& options,
                const std::shared_ptr<Stream>& stream = nullptr);

  const std::shared_ptr<StagedCopies>& copies() const { return copies_; }
  /// Whether it becomes part of a CUDA graph.
  bool is_captured() const { return step_ && step_->is_captured(); }
  /// Null unless it went by steps; once the operation is complete on the host.
  StepCall* launched() const { return step_ && step_->launched() ? step_.get() : nullptr; }
  /// Then: has the results copied back, unless they are on the devices.
  void take_back();

 private:
  std::shared_ptr<StagedCopies> copies_;
  std::shared_ptr<StepCall> step_;  // null: it goes by the host for certain
  std::shared_ptr<Pack> pack_;      // then, of more than one array
};

/// StagedCopies::hand_over for operations in the order in which they ran, once their results were
/// taken back.
void hand_over(std::span<const StagedOperation> operations, int device,
               std::optional<uint64_t> stream);

}  // namespace farandole
