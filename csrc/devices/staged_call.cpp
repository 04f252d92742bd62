#include "devices/staged_call.h"

#include "devices/step_call.h"

namespace farandole {
namespace {

/// Whether this rank's input is read at all.
bool reads_input(const Options& o, const PlacedArray& input, int rank) {
  return input.buffer.count > 0 && (o.kind != Collective::broadcast || rank == o.root);
}

/// Whether this rank's output changes: the root of a broadcast in place has it already.
bool writes_output(const Options& o, const PlacedArray& input, const PlacedArray& output,
                   int rank) {
  const bool has_it =
      o.kind == Collective::broadcast && rank == o.root && input.buffer.data == output.buffer.data;
  return output.buffer.count > 0 && !has_it;
}

/// An all_reduce may overwrite its copy of the input; others might, and need not.
bool may_share(const Options& o, const PlacedArray& input, const PlacedArray& output) {
  return o.kind == Collective::all_reduce && input.device && output.device &&
         input.device->queue == output.device->queue;
}

}  // namespace

Operand stage(StagedCopies& copies, const Options& options, const PlacedArray& input,
              const PlacedArray& output, int rank) {
  Buffer from = input.buffer, to = output.buffer;
  const bool brings = input.device && reads_input(options, input, rank);
  if (brings) from.data = copies.bring(*input.device);
  if (output.device && writes_output(options, input, output, rank))
    to.data = copies.expect(*output.device, brings && may_share(options, input, output));
  // What is not brought is not read: the other buffer's memory stands for it.
  if (input.device && from.data == input.buffer.data) from.data = to.data;
  if (output.device && to.data == output.buffer.data) to.data = from.data;
  return {from, to};
}

StagedArrays stage_all(StagedCopies& copies, const Options& options,
                       const std::vector<PlacedOperand>& arrays, int rank, int size,
                       BufferPool& pool) {
  std::vector<Operand> lie;
  for (const auto& [input, output] : arrays)
    lie.push_back(stage(copies, options, input, output, rank));
  copies.seal();
  if (lie.empty()) return {};
  if (lie.size() == 1) return {lie.front(), nullptr};
  auto pack = std::make_shared<Pack>(options.kind, size, std::move(lie));
  pack->reserve(pool);
  return {pack->operand(), pack};
}

std::shared_ptr<StagedCopies> copies_for(Group& group, Options& options) {
  const auto copies =
      std::make_shared<StagedCopies>(Staging::of(*group.engine()), group.membership().detector,
                                     group.engine()->host().rank, std::move(options.keepalive));
  options.gate = copies;
  return copies;
}

StagedCall::StagedCall(Group& group, Options& options, const PlacedArray& output)
    : copies_(copies_for(group, options)),
      device_(output.device ? output.device->queue->device() : -1) {
  options.completion = [copies = copies_](const Error* error) {
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
  return or_fail_group(group, [&] {
    step_ = StepCall::offer(group, options, {operand}, copies_);
    options.on_devices = step_;
    if (step_) return step_->operand();
    const Operand lies = stage(*copies_, options, operand.input, operand.output, group.rank());
    copies_->seal();
    return lies;
  });
}

StagedCall StagedCall::prepare(Group& group, const PlacedArray& input, const PlacedArray& output,
                               Options options, CollectiveCall& to_submit) {
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
  StagedCall call(group, options, array);
  data = array.buffer;
  or_fail_group(group, [&] {
    if (data.count > 0)
      data.data = options.kind == Collective::send ? call.copies_->bring(*array.device)
                                                   : call.copies_->expect(*array.device, false);
    call.copies_->seal();
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
  if (step_ && step_->launched())
    step_->hand_over(stream);
  else
    copies_->hand_over(device_, stream);
}

bool StagedCall::wait(Deadline until) {
  if (!handle_.wait(until)) return false;
  copies_->take_back();
  return true;
}

}  // namespace farandole
