#include "devices/staged_operation.h"

#include <utility>

namespace farandole {

Operand StagedOperation::offer(Group& group, const std::vector<PlacedOperand>& arrays,
                               Options& options) {
  step_ = StepCall::offer(group, options, arrays, copies_);
  options.on_devices = step_;
  if (step_) return step_->operand();
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

}  // namespace farandole
