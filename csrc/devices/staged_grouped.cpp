#include "devices/staged_grouped.h"

#include <algorithm>
#include <utility>

namespace farandole {

StagedGrouped::StagedGrouped(Group& group, const std::vector<PlacedOperand>& operands,
                             Options options, const PackLimits& limits, bool caller_waits) {
  group.check();
  is_captured_ = graph_of(operands).has_value();
  std::vector<Operand> buffers;
  for (const PlacedOperand& operand : operands) {
    const auto& [input, output] = buffers.emplace_back(operand.buffers());
    checked_shape(input, output, options, group.rank(), group.size());
    if (const auto& device = operand.output.device)
      outputs_.try_emplace(device->queue->device(), buffers.size() - 1);
  }
  options.bundle = bundle_of(options, buffers);
  std::vector<CollectiveCall> calls;
  for (const auto& members : plan_grouped(options, buffers, group.size(), limits)) {
    Options part = options;
    part.name = name_of_part(options, members, operands.size());
    std::vector<PlacedOperand> arrays;
    for (const size_t i : members) arrays.push_back(operands[i]);
    calls.push_back(or_fail_group(group, [&] {
      const Operand whole = operations_.emplace_back(group, part).offer(group, arrays, part);
      return CollectiveCall{whole, std::move(part)};
    }));
  }
  handles_ = group.submit_all(std::move(calls), caller_waits);
}

bool StagedGrouped::done() const { return std::ranges::all_of(handles_, &Handle::done); }

bool StagedGrouped::wait(Deadline until) {
  std::optional<Error> first;
  if (!wait_for_all(handles_, until, first)) return false;
  if (first) throw Error(*first);
  for (StagedOperation& each : operations_) each.take_back();
  return true;
}

void StagedGrouped::hand_over(int device, std::optional<uint64_t> stream) {
  farandole::hand_over(operations_, device, stream);
}

}  // namespace farandole
