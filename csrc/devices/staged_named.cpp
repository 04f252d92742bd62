#include "devices/staged_named.h"

#include <utility>

namespace farandole {
namespace {

/// Bytes of one in the first dimension.
size_t row_bytes_of(const PlacedTensor& tensor) {
  size_t bytes = size_of(tensor.input.buffer.dtype);
  for (size_t i = 1; i < tensor.shape.size(); ++i) bytes *= static_cast<size_t>(tensor.shape[i]);
  return bytes;
}

}  // namespace

std::shared_ptr<StagedNamed> StagedNamed::submit(Group& world, Named& named, NamedCall call,
                                                 const std::vector<PlacedTensor>& tensors,
                                                 std::shared_ptr<const void> kept) {
  world.check();
  for (const PlacedTensor& tensor : tensors)
    refuse_graph(tensor.input, "an operation that ranks agree on by its name");
  const auto staged = std::make_shared<StagedNamed>(world, std::move(kept));
  or_fail_group(world, [&] { staged->stage_all(call, tensors); });
  call.tensors = staged->staged_;
  call.gate = staged->copies_;
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
      copies_(std::make_shared<StagedCopies>(staging_, world.membership().detector, rank_,
                                             std::move(kept))) {}

StagedNamed::~StagedNamed() {
  for (Made& made : made_)
    if (made.block) staging_->give_back(std::move(made.block), {});
}

void StagedNamed::stage_all(const NamedCall& call, const std::vector<PlacedTensor>& tensors) {
  const Options options(call);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [input, output, shape] = tensors[i];
    PlacedArray nowhere;
    nowhere.buffer.dtype = input.buffer.dtype;
    const PlacedArray& result = output ? *output : nowhere;
    staged_.push_back({stage(*copies_, options, input, result, rank_), shape});
    Made& made = made_.emplace_back();
    if (output && output->device) outputs_.try_emplace(output->device->queue->device(), i);
    made.row_bytes = row_bytes_of(tensors[i]);
    if (input.device) made.queue = input.device->queue;
  }
  copies_->seal();
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
