#include "devices/staged_pieces.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

/// Also on a rank that gives or gets nothing.
const Buffer& longer_of(const PlacedOperand& arrays) {
  const Buffer &input = arrays.input.buffer, &output = arrays.output.buffer;
  return input.count > output.count ? input : output;
}

}  // namespace

size_t piece_of(const Group& group, const Options& options,
                const std::vector<PlacedOperand>& arrays) {
  const bool named = !options.algorithm.empty() || !group.defaults().algorithm.empty();
  if (arrays.size() != 1 || named || options.epilogue || !can_be_cut(options.kind)) return 0;
  const Buffer& whole = longer_of(arrays.front());
  const size_t elements = group.engine()->options().staged_piece_bytes / size_of(whole.dtype);
  return whole.count > elements ? elements : 0;
}

std::shared_ptr<StagedPieces> StagedPieces::of(std::shared_ptr<StagedCopies> copies,
                                               const CollectiveSpec& spec,
                                               const PlacedOperand& arrays, size_t elements,
                                               int rank) {
  std::shared_ptr<StagedPieces> made(
      new StagedPieces(std::move(copies), spec, arrays, elements, rank));
  while (made->brought_ + 1 < kAtOnce) made->bring_next();
  return made;
}

StagedPieces::StagedPieces(std::shared_ptr<StagedCopies> copies, const CollectiveSpec& spec,
                           const PlacedOperand& arrays, size_t elements, int rank)
    : copies_(std::move(copies)),
      arrays_(arrays),
      ends_(spec, arrays.input, arrays.output, rank),
      bytes_(elements * size_of(arrays.input.buffer.dtype)),
      all_(longer_of(arrays).bytes()) {
  copies_->leave_to_pieces(ends_.brings ? &*arrays_.input.device : nullptr,
                           ends_.takes_back ? &*arrays_.output.device : nullptr);
}

StagedPieces::~StagedPieces() { end_all(); }

StagedPieces::Stretch StagedPieces::stretch_of(size_t index) const {
  const size_t at = index * bytes_;
  return {at, std::min(bytes_, all_ - at)};
}

void StagedPieces::borrow(Place& place) {
  Staging& staging = copies_->staging();
  if (ends_.brings) place.input = staging.borrow(arrays_.input.device->queue, bytes_);
  if (ends_.shares)
    place.output = place.input;
  else if (ends_.takes_back)
    place.output = staging.borrow(arrays_.output.device->queue, bytes_);
}

/// Into the place of the one that went back before the one that is reduced, if it is there.
void StagedPieces::bring_next() {
  if (brought_ * bytes_ >= all_) return;
  const auto [at, bytes] = stretch_of(brought_);
  Place& place = place_of(brought_);
  if (brought_ < kAtOnce) borrow(place);
  if (ends_.takes_back) {
    DeviceQueue& queue = *arrays_.output.device->queue;
    if (brought_ >= kAtOnce) queue.precede(queue.stream());  // so its marks are after that
    if (!ends_.shares) place.output_is_free = queue.mark(kToHost);
  }
  if (ends_.brings) {
    const DeviceSpan& input = *arrays_.input.device;
    input.queue->copy_to_host(place.input->pages, input.address + at, bytes);
    place.input_has_come = input.queue->mark(kToHost);
  }
  ++brought_;
}

void StagedPieces::take_back(size_t index) {
  if (!ends_.takes_back) return;
  const auto [at, bytes] = stretch_of(index);
  const DeviceSpan& output = *arrays_.output.device;
  output.queue->copy_to_device(output.address + at, place_of(index).output->pages, bytes);
}

void StagedPieces::begin(Operation& piece) {
  const auto memory_of = [](const std::shared_ptr<StagingBlock>& block) {
    return block ? block->memory.get() : nullptr;
  };
  const Place& place = place_of(ended_);
  const Operand lies =
      ends_.lie({piece.input, arrays_.input.device}, {piece.output, arrays_.output.device},
                memory_of(place.input), memory_of(place.output));
  piece.input = lies.input;
  piece.output = lies.output;
  piece.gate = shared_from_this();
}

/// The next one is brought first: it does not wait for this one's result.
void StagedPieces::end() {
  try {
    bring_next();
    take_back(ended_++);
  } catch (const Error& error) {
    throw on_rank(error, copies_->rank());
  }
  if (ended_ * bytes_ >= all_) end_all();
}

void StagedPieces::end_all() noexcept {
  if (std::exchange(all_ended_, true)) return;
  std::vector<std::shared_ptr<StagingBlock>> blocks;
  for (Place& place : places_) {
    if (place.output && !ends_.shares) blocks.push_back(std::move(place.output));
    if (place.input) blocks.push_back(std::move(place.input));
  }
  copies_->end_pieces(blocks);
}

bool StagedPieces::is_open() {
  const Place& place = place_of(ended_);
  const auto reached = [](const PlacedArray& array, uint32_t mark) {
    return array.device->queue->reached(kToHost, mark);
  };
  const bool has_come = !ends_.brings || reached(arrays_.input, place.input_has_come);
  const bool is_free =
      !ends_.takes_back || ends_.shares || reached(arrays_.output, place.output_is_free);
  if (has_come && is_free) return true;
  if (watch_.due()) look_for_loss();
  return false;
}

void StagedPieces::look_for_loss() {
  try {
    if (ends_.brings) arrays_.input.device->queue->look_for_loss();
    if (ends_.takes_back) arrays_.output.device->queue->look_for_loss();
  } catch (const Error& error) {
    throw on_rank(error, copies_->rank());
  }
}

std::string StagedPieces::awaited() const {
  const PlacedArray& array = ends_.brings ? arrays_.input : arrays_.output;
  return "a piece of its arrays on device " + std::to_string(array.device->queue->device());
}

}  // namespace farandole
