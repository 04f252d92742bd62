#include "devices/staged_operation.h"

#include <utility>

namespace farandole {

Operand StagedOperation::offer(Group& group, const std::vector<PlacedOperand>& arrays,
                               Options& options, const std::shared_ptr<Stream>& stream) {
  step_ = StepCall::offer(group, options, arrays, copies_, stream);
  options.on_devices = step_;
  if (step_) return step_->operand();
  options.on_devices = PieceCall::offer(group, options, arrays, copies_);
  if (options.on_devices) return arrays.front().buffers();
  StagedArrays lie = stage_all(*copies_, options, arrays, group.rank(), group.size(), group.pool());
  pack_ = std::move(lie.pack);
  if (pack_) {
    options.counts = pack_->counts();
    run_on(pack_, options);
  }
  return lie.whole;
}

void StagedOperation::take_back() {
  if (launched() != nullptr) return;
  if (pack_) pack_->unpack_all();
  if (step_) step_->unpack();
  copies_->take_back();
}

/// Operations of the devices' streams come one after the other: the last one is after all.
void hand_over(std::span<const StagedOperation> operations, int device,
               std::optional<uint64_t> stream) {
  StepCall* last = nullptr;
  for (const StagedOperation& each : operations)
    if (StepCall* const step = each.launched())
      last = step->device() == device ? step : last;
    else
      each.copies()->hand_over(device, stream);
  if (last != nullptr) last->hand_over(stream);
}

}  // namespace farandole
