#include "devices/staged_pieces.h"

#include <algorithm>
#include <span>
#include <utility>

#include "devices/step_plan.h"

namespace farandole {

size_t staged_piece_of(const Group& group, const Options& options,
                       const std::vector<PlacedOperand>& arrays) {
  const bool named = !options.algorithm.empty() || !group.defaults().algorithm.empty();
  if (arrays.size() != 1 || named || options.epilogue || !can_be_cut(options.kind)) return 0;
  const auto& [input, output] = arrays.front().buffers();
  const Shape shape = checked_shape(input, output, options, group.rank(), group.size());
  const size_t most = group.engine()->options().staged_piece_bytes / size_of(input.dtype);
  if (amount_of(options.kind, shape) <= most) return 0;
  if (is_cut_by_elements(options.kind)) return most;
  return std::max<size_t>(most / static_cast<size_t>(group.size()), 1);
}

std::shared_ptr<StagedPieces> StagedPieces::of(std::shared_ptr<StagedCopies> copies,
                                               const CollectiveSpec& spec,
                                               const PlacedOperand& arrays, Cut cut, int rank) {
  std::shared_ptr<StagedPieces> made(
      new StagedPieces(std::move(copies), spec, arrays, std::move(cut), rank));
  made->borrow();
  for (size_t ahead = 1; ahead < kAtOnce; ++ahead) made->bring_next();
  return made;
}

StagedPieces::StagedPieces(std::shared_ptr<StagedCopies> copies, const CollectiveSpec& spec,
                           const PlacedOperand& arrays, Cut cut, int rank)
    : copies_(std::move(copies)),
      arrays_(arrays),
      ends_(spec, arrays.input, arrays.output, rank),
      cut_(std::move(cut)),
      width_(size_of(arrays.input.buffer.dtype)) {
  copies_->leave_to_pieces(ends_.brings ? &*arrays_.input.device : nullptr,
                           ends_.takes_back ? &*arrays_.output.device : nullptr);
}

StagedPieces::~StagedPieces() {
  try {
    end_all();
  } catch (const Error&) {  // NOLINT: of an operation that has failed
  }
}

/// Borrows all blocks at once, so that an operation's memory does not depend on timing.
void StagedPieces::borrow() {
  Staging& staging = copies_->staging();
  const CutPiece longest = cut_[0];
  const size_t input = count_of(longest.input) * width_, output = count_of(longest.output) * width_;
  for (Place& place : std::span(places_).first(std::min(kAtOnce, cut_.pieces()))) {
    if (ends_.brings) place.input = staging.borrow(arrays_.input.device->queue, input);
    if (ends_.shares)
      place.output = place.input;
    else if (ends_.takes_back)
      place.output = staging.borrow(arrays_.output.device->queue, output);
  }
}

/// Copies the next piece in, if there is one: to the blocks of the piece that went back last.
void StagedPieces::bring_next() {
  if (brought_ == cut_.pieces()) return;
  Place& place = place_of(brought_);
  DeviceQueue* const results = ends_.takes_back ? arrays_.output.device->queue.get() : nullptr;
  if (results != nullptr && brought_ >= kAtOnce)
    results->precede(results->stream());  // its marks come after that
  if (ends_.brings) {
    const DeviceSpan& input = *arrays_.input.device;
    size_t offset = 0;
    for (const auto& [at, count] : cut_[brought_].input) {
      const size_t bytes = count * width_;
      if (bytes > 0)
        input.queue->copy_to_host(place.input->pages, input.address + at * width_, bytes, offset);
      offset += bytes;
    }
    place.input_has_come = input.queue->mark(kToHost);
  }
  const bool one_queue = ends_.brings && arrays_.input.device->queue.get() == results;
  if (results != nullptr)
    place.output_is_free = one_queue ? place.input_has_come : results->mark(kToHost);
  ++brought_;
}

void StagedPieces::take_back(size_t index) {
  if (!ends_.takes_back) return;
  const DeviceSpan& output = *arrays_.output.device;
  const DevicePages& pages = place_of(index).output->pages;
  size_t offset = 0;
  for (const auto& [at, count] : cut_[index].output) {
    const size_t bytes = count * width_;
    if (bytes > 0) output.queue->copy_to_device(output.address + at * width_, pages, bytes, offset);
    offset += bytes;
  }
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

/// The next piece is copied in first, so it does not wait for this one's result.
void StagedPieces::end() {
  try {
    bring_next();
    take_back(ended_++);
    if (ended_ == cut_.pieces()) end_all();
  } catch (const Error& error) {
    throw on_rank(error, copies_->rank());
  }
}

void StagedPieces::end_all() {
  if (std::exchange(all_ended_, true)) return;
  std::vector<std::shared_ptr<StagingBlock>> blocks;
  for (Place& place : places_) {
    if (place.output && !ends_.shares) blocks.push_back(std::move(place.output));
    if (place.input) blocks.push_back(std::move(place.input));
  }
  copies_->end_pieces(blocks, ended_ == cut_.pieces());
}

bool StagedPieces::is_open() {
  const Place& place = place_of(ended_);
  const auto reached = [](const PlacedArray& array, uint32_t mark) {
    return array.device->queue->reached(kToHost, mark);
  };
  const bool has_come = !ends_.brings || reached(arrays_.input, place.input_has_come);
  const bool is_free = !ends_.takes_back || reached(arrays_.output, place.output_is_free);
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
