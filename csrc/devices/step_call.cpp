#include "devices/step_call.h"

#include <thread>
#include <utility>

#include "base/hash.h"

namespace farandole {
namespace {

constexpr auto kBetweenCompletionLooks = std::chrono::microseconds(50);

std::optional<int> device_of(const PlacedArray& array) {
  return array.device ? std::optional(array.device->queue->device()) : std::nullopt;
}

/// Of what this rank reads and writes: the input of a broadcast is the root's alone, and what is
/// empty, or not there, may lie anywhere.
std::optional<int> device_of(const Options& o, const PlacedArray& input, const PlacedArray& output,
                             int rank) {
  const bool reads = input.buffer.count > 0 && (o.kind != Collective::broadcast || rank == o.root);
  const bool writes = output.buffer.count > 0;
  const auto from = device_of(input), to = device_of(output);
  if ((reads && !from) || (writes && !to) || (reads && writes && from != to)) return std::nullopt;
  if (reads) return from;
  return writes || !from ? to : from;
}

/// Whether nobody has said how.
bool may_choose(const Group& group, const Options& options) {
  return group.engine()->options().device_path != "staged" && options.algorithm.empty() &&
         group.defaults().algorithm.empty() && !options.bundle && !options.epilogue;
}

/// NCCL was asked for, for this call or for all of them, and may not.
void check_level(const Group& group, const Options& o) {
  const std::string& asked =
      o.algorithm.empty() ? group.engine()->options().device_path : o.algorithm;
  if (asked != name_of(DeviceWay::nccl)) return;
  const std::string why = why_not_of_level(o.kind, o.level.value_or(group.defaults().level));
  if (!why.empty())
    throw Error(ErrorCode::invalid_argument,
                std::string(name_of(o.kind)) + " cannot go by 'nccl': " + why, {},
                "choose level='fast' (FARANDOLE_LEVEL=fast), or another way for it");
}

/// Of what ranks agree on, as far as it decides whether all have their arrays on devices, and go by
/// them.
uint64_t hash_of_call(const Options& o, Determinism level, DType dtype, size_t count) {
  Hash hash;
  hash.add(static_cast<uint64_t>(o.op) | static_cast<uint64_t>(level) << 32);
  hash.add(o.prescale);
  hash.add(o.postscale);
  hash.add(static_cast<uint64_t>(o.kind) | static_cast<uint64_t>(o.root) << 32);
  hash.add(static_cast<uint64_t>(dtype) << 56 | count);
  hash.add(std::span(o.counts));
  hash.add(o.algorithm);
  hash.add(o.name);
  return hash.value();
}

}  // namespace

std::shared_ptr<StepCall> StepCall::offer(Group& group, Options& options, const PlacedArray& input,
                                          const PlacedArray& output,
                                          std::shared_ptr<StagedCopies> copies) {
  const auto asked = device_way_named(options.algorithm);
  if (asked == DeviceWay::staged) options.algorithm.clear();
  if (asked ? asked == DeviceWay::staged : !may_choose(group, options)) return nullptr;
  const auto device = device_of(options, input, output, group.rank());
  const Shape shape =
      checked_shape(input.buffer, output.buffer, options, group.rank(), group.size());
  const bool runs = has_steps(options.kind);
  if (runs && amount_of(options.kind, shape) == 0) {  // on no rank there is anything to do
    if (asked) options.algorithm.clear();
    return nullptr;
  }
  if (runs) check_level(group, options);
  const auto steps = device && runs ? Steps::of(group, *device) : nullptr;
  if (asked && !steps)
    throw Error(ErrorCode::invalid_argument,
                std::string(name_of(options.kind)) + " cannot go by '" + options.algorithm +
                    "' here: that takes input and output on one device, the group's own, of ranks "
                    "that share a host");
  const Determinism level = options.level.value_or(group.defaults().level);
  const uint64_t call = hash_of_call(options, level, output.buffer.dtype, shape.count);
  if (!steps || !steps->worth_trying(call)) return nullptr;
  return std::shared_ptr<StepCall>(
      new StepCall(steps, group, options, input, output, std::move(copies), call));
}

StepCall::StepCall(std::shared_ptr<Steps> steps, const Group& group, const Options& options,
                   const PlacedArray& input, const PlacedArray& output,
                   std::shared_ptr<StagedCopies> copies, uint64_t call)
    : steps_(std::move(steps)),
      detector_(group.membership().detector),
      rank_(group.rank()),
      world_rank_(group.engine()->host().rank),
      spec_(options),
      input_(input),
      output_(output),
      copies_(std::move(copies)),
      call_(call) {
  arrays_.input = input.device ? input.device->address : 0;
  arrays_.output = output.device ? output.device->address : 0;
  arrays_.kept = copies_;  // which keeps the arrays
  const bool to_here = device_of(output) == steps_->device();
  const DeviceQueue& queue = to_here ? *output.device->queue : *input.device->queue;
  if (steps_->exchange()) arrays_.moments = steps_->exchange()->moments(queue);
}

Backend& StepCall::backend() {
  steps_->backend().take(arrays_);
  return steps_->backend();
}

void StepCall::go_by_host(Operation& operation) {
  steps_->note_failed(call_);
  try {
    const Operand lies = stage(*copies_, Options(spec_), input_, output_, rank_);
    copies_->seal();
    operation.input = lies.input;
    operation.output = lies.output;
  } catch (const Error& error) {
    throw on_rank(error, world_rank_);
  }
}

void StepCall::check() const {
  if (!detector_->failed() || steps_->exchange()->is_complete(arrays_.number)) return;
  if (const auto verdict = detector_->verdict()) throw Error(*verdict);
}

void StepCall::hand_over(std::optional<uint64_t> stream) {
  try {
    if (stream)
      steps_->exchange()->complete_before(*arrays_.moments, *stream);
    else
      while (!steps_->exchange()->is_complete(arrays_.number)) {
        check();
        std::this_thread::sleep_for(kBetweenCompletionLooks);
      }
  } catch (const Error& error) {
    if (!detector_->failed()) detector_->report(on_rank(error, world_rank_));
    if (const auto verdict = detector_->verdict()) throw Error(*verdict);
    throw;
  }
  check();
}

}  // namespace farandole
