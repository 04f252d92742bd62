#include "devices/staged_call.h"

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

StagedCall StagedCall::submit(Group& group, const PlacedArray& input, const PlacedArray& output,
                              Options options, bool caller_waits) {
  group.check();
  checked_shape(input.buffer, output.buffer, options, group.rank(), group.size());
  const auto copies =
      std::make_shared<StagedCopies>(Staging::of(*group.engine()), group.membership().detector,
                                     group.engine()->host().rank, std::move(options.keepalive));
  Buffer from = input.buffer, to = output.buffer;
  or_fail_group(group, [&] {
    const bool brings = input.device && reads_input(options, input, group.rank());
    if (brings) from.data = copies->bring(*input.device);
    if (output.device && writes_output(options, input, output, group.rank()))
      to.data = copies->expect(*output.device, brings && may_share(options, input, output));
    copies->seal();
  });
  // What is not brought is not read: the other buffer's memory stands for it.
  if (input.device && from.data == input.buffer.data) from.data = to.data;
  if (output.device && to.data == output.buffer.data) to.data = from.data;
  options.gate = copies;
  options.completion = [copies](const Error* error) {
    if (error != nullptr) return;
    try {
      copies->take_back();
    } catch (const Error&) {  // NOLINT: whoever waits hears of it
    }
  };
  return {group.submit(from, to, std::move(options), caller_waits), copies};
}

bool StagedCall::wait(Deadline until) {
  if (!handle_.wait(until)) return false;
  copies_->take_back();
  copies_->hand_over();
  return true;
}

}  // namespace farandole
