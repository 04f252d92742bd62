#include "devices/staged_copies.h"

#include <unistd.h>

#include <utility>

#include "engine/fork.h"

namespace farandole {
namespace {

/// How often a device is asked whether it is lost, while nothing is heard of it.
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

}  // namespace

Error on_rank(const Error& error, int rank) {
  Context where = error.where();
  where.rank = rank;
  where.pid = ::getpid();
  return {error.code(), "rank " + std::to_string(rank) + ": " + error.verdict(), where,
          error.advice()};
}

StagedCopies::StagedCopies(std::shared_ptr<Staging> staging,
                           std::shared_ptr<FailureDetector> detector, int rank,
                           std::shared_ptr<const void> kept)
    : staging_(std::move(staging)),
      detector_(std::move(detector)),
      rank_(rank),
      kept_(std::move(kept)) {}

StagedCopies::~StagedCopies() {
  give_back();               // of an operation that failed
  if (handed_over_) return;  // whoever uses the arrays' memory next comes after the copies
  for (const std::optional<Copy>* copy : {&input_, &output_})
    if (*copy) staging_->keep(kept_, (*copy)->span.queue, (*copy)->until);
}

void StagedCopies::give_back() {
  if (input_ && output_ && input_->block == output_->block) {
    output_->until.lost |= input_->until.lost;
    input_->block = nullptr;
  }
  for (std::optional<Copy>* copy : {&input_, &output_})
    if (*copy && (*copy)->block)
      staging_->give_back(std::exchange((*copy)->block, nullptr), (*copy)->until);
}

std::byte* StagedCopies::bring(const DeviceSpan& input) {
  input_ = Copy{input, staging_->borrow(input.queue, input.bytes), {}};
  input_->until.lost = true;  // until there is a mark after it
  input.queue->copy_to_host(input_->block->pages, input.address, input.bytes);
  return input_->block->memory.get();
}

std::byte* StagedCopies::expect(const DeviceSpan& output, bool where_input_lies) {
  const auto block =
      where_input_lies ? input_->block : staging_->borrow(output.queue, output.bytes);
  output_ = Copy{output, block, {}};
  return output_->block->memory.get();
}

void StagedCopies::seal() {
  if (input_) mark_arrival(*input_);
  if (!output_) return;
  if (input_ && input_->span.queue == output_->span.queue)
    output_->until = input_->until;  // one mark is after both
  else
    mark_arrival(*output_);
}

void StagedCopies::mark_arrival(Copy& copy) {
  copy.until.to_host = copy.span.queue->mark(kToHost);
  copy.until.has_to_host = true;
  copy.until.lost = false;
}

bool StagedCopies::is_open() {
  const auto arrived = [](const std::optional<Copy>& copy) {
    return !copy || copy->span.queue->reached(kToHost, copy->until.to_host);
  };
  if (arrived(input_) && arrived(output_)) return true;
  if (const TimePoint when = now(); when >= next_look_) {
    if (next_look_ != TimePoint{}) look_for_loss();
    next_look_ = when + kBetweenLooks;
  }
  return false;
}

void StagedCopies::look_for_loss() {
  try {
    if (input_) input_->span.queue->look_for_loss();
    if (output_) output_->span.queue->look_for_loss();
  } catch (const Error& error) {
    throw on_rank(error, rank_);
  }
}

std::string StagedCopies::awaited() const {
  const int device = (input_ ? input_ : output_)->span.queue->device();
  return "its arrays on device " + std::to_string(device);
}

void StagedCopies::fail(const Error& error) {
  failure_ = on_rank(error, rank_);
  detector_->report(*failure_);
  throw Error(*failure_);
}

void StagedCopies::take_back() {
  const std::lock_guard lock(mutex_);
  if (failure_) throw Error(*failure_);
  if (std::exchange(taken_back_, true)) return;
  if (!output_) return give_back();
  CopiesUntil& until = output_->until;
  try {
    until.lost = true;
    output_->span.queue->copy_to_device(output_->span.address, output_->block->pages,
                                        output_->span.bytes);
    until.to_device = output_->span.queue->mark(kToDevice);
    until.has_to_device = true;
    until.lost = false;
    give_back();
  } catch (const Error& error) {
    fail(error);
  }
}

void StagedCopies::hand_over(std::optional<uint64_t> stream) {
  const std::lock_guard lock(mutex_);
  if (!output_) return;
  try {
    if (stream)
      output_->span.queue->precede(*stream);
    else
      output_->span.queue->synchronize(kToDevice);
  } catch (const Error& error) {
    fail(error);
  }
  handed_over_ = true;
}

}  // namespace farandole
