#include "devices/staged_grouped.h"

namespace farandole {

StagedGrouped::StagedGrouped(Group& group, const std::vector<PlacedOperand>& operands,
                             Options options, const PackLimits& limits, bool caller_waits) {
  group.check();
  for (const auto& [input, output] : operands)
    checked_shape(input.buffer, output.buffer, options, group.rank(), group.size());
  copies_ = copies_for(group, options);
  std::vector<Operand> staged;
  or_fail_group(group, [&] {
    for (const auto& [input, output] : operands) {
      if (output.device) outputs_.try_emplace(output.device->queue->device(), staged.size());
      staged.push_back(stage(*copies_, options, input, output, group.rank()));
    }
    copies_->seal();
    return true;
  });
  grouped_ = std::make_unique<Grouped>(group, std::move(staged), std::move(options), limits);
  grouped_->submit(caller_waits);
}

bool StagedGrouped::wait(Deadline until) {
  if (!grouped_->wait(until)) return false;
  copies_->take_back();
  return true;
}

}  // namespace farandole
