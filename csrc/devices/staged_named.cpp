#include "devices/staged_named.h"

#include <utility>

#include "stream/gates.h"

namespace farandole {
namespace {

/// Bytes of one row, along the first dimension.
size_t row_bytes_of(const PlacedTensor& tensor) {
  size_t bytes = size_of(tensor.input.buffer.dtype);
  for (size_t i = 1; i < tensor.shape.size(); ++i) bytes *= static_cast<size_t>(tensor.shape[i]);
  return bytes;
}

/// In the stream of the world's names: another set has one of its own.
bool is_alone(const Named& named, const NamedCall& call, const PlacedArray& input) {
  return (call.kind == Collective::all_reduce || call.kind == Collective::broadcast) &&
         call.set == 0 && named.travels_alone(input.buffer.bytes());
}

}  // namespace

std::shared_ptr<StagedNamed> StagedNamed::submit(Group& world, Named& named, NamedCall call,
                                                 const std::vector<PlacedTensor>& tensors,
                                                 std::shared_ptr<const void> kept) {
  world.check();
  for (const PlacedTensor& tensor : tensors)
    refuse_graph(tensor.input, "an operation that ranks agree on by its name");
  const auto staged = std::make_shared<StagedNamed>(world, std::move(kept));
  or_fail_group(world, [&] { staged->stage_all(world, named, call, tensors); });
  call.tensors = staged->staged_;
  call.on_devices = staged->on_devices_;
  call.gate = all_of(staged->gates_);
  call.listener = staged.get();
  call.completion = [staged](const Error* error) {
    if (error != nullptr) return;
    try {
      staged->take_back();
    } catch (const Error&) {  // NOLINT: whoever waits hears of it
    }
  };
  staged->request_ = named.submit(call);
  return staged;
}

StagedNamed::StagedNamed(Group& world, std::shared_ptr<const void> kept)
    : rank_(world.rank()),
      staging_(Staging::of(*world.engine())),
      kept_(std::move(kept)),
      copies_(std::make_shared<StagedCopies>(staging_, world.membership().detector, rank_, kept_)),
      gates_{copies_} {}

StagedNamed::~StagedNamed() {
  for (Made& made : made_)
    if (made.block) staging_->give_back(std::move(made.block), {});
}

void StagedNamed::stage_all(Group& world, const Named& named, const NamedCall& call,
                            const std::vector<PlacedTensor>& tensors) {
  const Options options(call);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [input, output, shape] = tensors[i];
    PlacedArray nowhere;
    nowhere.buffer.dtype = input.buffer.dtype;
    const PlacedArray& result = output ? *output : nowhere;
    on_devices_.emplace_back();
    const Operand lies = output && is_alone(named, call, input)
                             ? stage_alone(world, call, {input, *output})
                             : stage(*copies_, options, input, result, rank_);
    staged_.push_back({lies, shape});
    Made& made = made_.emplace_back();
    if (output && output->device) outputs_.try_emplace(output->device->queue->device(), i);
    made.row_bytes = row_bytes_of(tensors[i]);
    if (input.device) made.queue = input.device->queue;
  }
  copies_->seal();
}

/// Stages the tensor of the last entry of on_devices_ as an operation. Returns its buffers.
Operand StagedNamed::stage_alone(Group& world, const NamedCall& call, const PlacedOperand& tensor) {
  Options options(call);
  options.name = call.name;
  options.keepalive = kept_;
  StagedOperation& operation = alone_.emplace_back(world, options);
  gates_.push_back(options.gate);
  const Operand lies = operation.offer(world, {tensor}, options, world.stream_of_names());
  on_devices_.back() = std::move(options.on_devices);
  return lies;
}

void StagedNamed::take_back() {
  copies_->take_back();
  for (StagedOperation& each : alone_) each.take_back();
}

void StagedNamed::hand_over(int device, std::optional<uint64_t> stream) {
  copies_->hand_over(device, stream);
  farandole::hand_over(alone_, device, stream);
}

std::byte* StagedNamed::make_room(size_t tensor, std::span<const int64_t> shape) {
  Made& made = made_[tensor];
  made.shape.assign(shape.begin(), shape.end());
  const size_t bytes = made.bytes = made.row_bytes * static_cast<size_t>(shape[0]);
  if (bytes == 0) return nullptr;
  if (!made.queue) {
    made.memory = allocate_result(bytes);
    return made.memory.get();
  }
  try {
    made.block = staging_->borrow(made.queue, bytes);
  } catch (const Error& error) {
    throw on_rank(error, rank_);
  }
  return made.block->memory.get();
}

void StagedNamed::deliver(Group& world, size_t tensor, const DeviceSpan& to,
                          std::optional<uint64_t> stream) {
  Made& made = made_[tensor];
  if (!made.block) return;  // of no elements
  if (made.bytes != to.bytes)
    throw Error(ErrorCode::invalid_argument, "a result of " + std::to_string(made.bytes) +
                                                 " bytes is wanted in an array of " +
                                                 std::to_string(to.bytes));
  if (made.queue != to.queue)
    throw Error(ErrorCode::invalid_argument,
                "a result for device " + std::to_string(made.queue->device()) +
                    " is wanted on device " + std::to_string(to.queue->device()));
  CopiesUntil until;
  or_fail_group(world, [&] {
    DeviceQueue& queue = *to.queue;
    queue.synchronize(kToHost);
    until.lost = true;
    queue.copy_to_device(to.address, made.block->pages, to.bytes);
    until = {.to_device = queue.mark(kToDevice), .has_to_device = true};
    if (stream)
      queue.precede(*stream);
    else
      queue.synchronize(kToDevice);
  });
  staging_->give_back(std::move(made.block), until);
}

}  // namespace farandole
