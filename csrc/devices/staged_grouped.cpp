#include "devices/staged_grouped.h"

#include <algorithm>
#include <utility>

#include "devices/step_call.h"

namespace farandole {

StagedGrouped::StagedGrouped(Group& group, const std::vector<PlacedOperand>& operands,
                             Options options, const PackLimits& limits, bool caller_waits) {
  group.check();
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
    calls.push_back(or_fail_group(group, [&] { return begin(group, arrays, std::move(part)); }));
  }
  handles_ = group.submit_all(std::move(calls), caller_waits);
}

CollectiveCall StagedGrouped::begin(Group& group, const std::vector<PlacedOperand>& arrays,
                                    Options options) {
  CollectiveCall call;
  Part& part = parts_.emplace_back();
  part.copies = copies_for(group, options);
  part.step = StepCall::offer(group, options, arrays, part.copies);
  if (part.step) {
    options.on_devices = part.step;
    return {part.step->operand(), std::move(options)};
  }
  StagedArrays lie =
      stage_all(*part.copies, options, arrays, group.rank(), group.size(), group.pool());
  part.pack = std::move(lie.pack);
  call.operand = lie.whole;
  if (part.pack) {
    options.counts = part.pack->counts();
    run_on(part.pack, options);
  }
  call.options = std::move(options);
  return call;
}

bool StagedGrouped::done() const { return std::ranges::all_of(handles_, &Handle::done); }

void StagedGrouped::take_back(Part& part) {
  if (part.step && part.step->launched()) return;
  if (part.pack) part.pack->unpack_all();
  if (part.step) part.step->unpack();
  part.copies->take_back();
}

bool StagedGrouped::wait(Deadline until) {
  std::optional<Error> first;
  if (!wait_for_all(handles_, until, first)) return false;
  if (first) throw Error(*first);
  for (Part& part : parts_) take_back(part);
  return true;
}

/// Operations of the devices' streams come one after the other: the last one is after all.
void StagedGrouped::hand_over(int device, std::optional<uint64_t> stream) {
  StepCall* last = nullptr;
  for (const Part& part : parts_)
    if (part.step && part.step->launched())
      last = part.step->device() == device ? part.step.get() : last;
    else
      part.copies->hand_over(device, stream);
  if (last != nullptr) last->hand_over(stream);
}

}  // namespace farandole
