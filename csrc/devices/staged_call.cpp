#include "devices/staged_call.h"

namespace farandole {

StagedCall::StagedCall(Group& group, Options& options, const PlacedArray& output)
    : operation_(group, options), device_(output.device ? output.device->queue->device() : -1) {
  options.completion = [copies = operation_.copies()](const Error* error) {
    if (error != nullptr) return;
    try {
      copies->take_back();
    } catch (const Error&) {  // NOLINT: whoever waits hears of it
    }
  };
}

StagedCall StagedCall::checked(Group& group, const PlacedArray& input, const PlacedArray& output,
                               Options& options) {
  group.check();
  checked_shape(input.buffer, output.buffer, options, group.rank(), group.size());
  return {group, options, output};
}

Operand StagedCall::offered(Group& group, Options& options, const PlacedOperand& operand) {
  return or_fail_group(group, [&] { return operation_.offer(group, {operand}, options); });
}

StagedCall StagedCall::prepare(Group& group, const PlacedArray& input, const PlacedArray& output,
                               Options options, CollectiveCall& to_submit) {
  refuse_graph(input, "a collective that is submitted together with others");
  refuse_graph(output, "a collective that is submitted together with others");
  StagedCall call = checked(group, input, output, options);
  to_submit.operand = call.offered(group, options, {input, output});
  to_submit.options = std::move(options);
  return call;
}

StagedCall StagedCall::submit(Group& group, const PlacedArray& input, const PlacedArray& output,
                              Options options, bool caller_waits) {
  StagedCall call = checked(group, input, output, options);
  const Operand operand = call.offered(group, options, {input, output});
  call.begin(group.submit(operand.input, operand.output, std::move(options), caller_waits));
  return call;
}

StagedCall StagedCall::end_of_message(Group& group, const PlacedArray& array, Options& options,
                                      Buffer& data) {
  group.check();
  refuse_graph(array, name_of(options.kind));
  StagedCall call(group, options, array);
  data = array.buffer;
  StagedCopies& copies = *call.operation_.copies();
  or_fail_group(group, [&] {
    if (data.count > 0)
      data.data = options.kind == Collective::send ? copies.bring(*array.device)
                                                   : copies.expect(*array.device, false);
    copies.seal();
  });
  return call;
}

StagedCall StagedCall::submit_between(Group& group, int peer, int tag, const PlacedArray& array,
                                      Options options, bool caller_waits) {
  Buffer data;
  StagedCall call = end_of_message(group, array, options, data);
  call.begin(group.submit_between(peer, tag, data, std::move(options), caller_waits));
  return call;
}

std::pair<StagedCall, std::shared_ptr<const int>> StagedCall::submit_from_any(
    Group& group, int tag, const PlacedArray& array, Options options) {
  options.kind = Collective::recv;
  Buffer data;
  StagedCall call = end_of_message(group, array, options, data);
  auto [handle, source] = group.submit_from_any(tag, data, std::move(options));
  call.begin(handle);
  return {std::move(call), std::move(source)};
}

void StagedCall::hand_over(std::optional<uint64_t> stream) {
  if (StepCall* step = operation_.launched())
    step->hand_over(stream);
  else
    operation_.copies()->hand_over(device_, stream);
}

bool StagedCall::wait(Deadline until) {
  if (!handle_.wait(until)) return false;
  operation_.take_back();
  return true;
}

}  // namespace farandole
