#include "devices/staged_copies.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "engine/fork.h"

namespace farandole {

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
  if (handed_over_) return;  // the next user of the arrays' memory comes after the copies
  for (const std::vector<Copy>* copies : {&inputs_, &outputs_})
    for (const Copy& copy : *copies) staging_->keep(kept_, copy.span.queue, copy.until);
}

void StagedCopies::give_back() {
  for (std::vector<Copy>* copies : {&inputs_, &outputs_})
    for (Copy& copy : *copies)
      if (copy.block) staging_->give_back(std::exchange(copy.block, nullptr), copy.until);
}

std::byte* StagedCopies::bring(const DeviceSpan& input) {
  inputs_.push_back({input, staging_->borrow(input.queue, input.bytes), {}});
  Copy& copy = inputs_.back();
  copy.until.lost = true;  // until there is a mark after it
  input.queue->copy_to_host(copy.block->pages, input.address, input.bytes);
  return copy.block->memory.get();
}

std::byte* StagedCopies::expect(const DeviceSpan& output, bool where_input_lies) {
  auto block = where_input_lies ? std::move(inputs_.back().block)
                                : staging_->borrow(output.queue, output.bytes);
  outputs_.push_back({output, std::move(block), {}});
  Copy& copy = outputs_.back();
  copy.until.lost = where_input_lies;  // as the input's
  return copy.block->memory.get();
}

/// One mark per device follows all of its copies, and the work of outputs' owners up to now.
void StagedCopies::seal() {
  std::map<const DeviceQueue*, uint32_t> marks;
  for (std::vector<Copy>* copies : {&inputs_, &outputs_})
    for (Copy& copy : *copies) {
      const auto [mark, is_new] = marks.try_emplace(copy.span.queue.get(), 0);
      if (is_new) mark->second = copy.span.queue->mark(kToHost);
      copy.until = {.to_host = mark->second, .has_to_host = true};
    }
}

void StagedCopies::leave_to_pieces(const DeviceSpan* input, const DeviceSpan* output) {
  if (input != nullptr) inputs_.push_back({*input, nullptr, {.lost = true}});
  if (output != nullptr) outputs_.push_back({*output, nullptr, {.lost = true}});
}

void StagedCopies::end_pieces(const std::vector<std::shared_ptr<StagingBlock>>& blocks,
                              bool have_come) {
  const std::lock_guard lock(mutex_);
  taken_back_ = true;
  std::map<const DeviceQueue*, CopiesUntil> marks;
  for (const std::vector<Copy>* copies : {&inputs_, &outputs_})
    for (const Copy& copy : *copies) marks[copy.span.queue.get()] = {};
  std::optional<Error> failure;
  try {
    for (const Copy& copy : outputs_)
      marks[copy.span.queue.get()] = {.to_device = copy.span.queue->mark(kToDevice),
                                      .has_to_device = true};
    for (const Copy& copy : inputs_) {
      if (have_come) break;
      CopiesUntil& until = marks[copy.span.queue.get()];
      until.to_host = copy.span.queue->mark(kToHost);
      until.has_to_host = true;
    }
  } catch (const Error& error) {
    failure = error;
    for (auto& [queue, until] : marks) until.lost = true;
  }
  for (std::vector<Copy>* copies : {&inputs_, &outputs_})
    for (Copy& copy : *copies) copy.until = marks.at(copy.span.queue.get());
  for (const auto& block : blocks) staging_->give_back(block, marks.at(block->queue.get()));
  if (failure) throw Error(*failure);
}

bool StagedCopies::is_open() {
  const auto arrived = [](const Copy& copy) {
    return !copy.until.has_to_host || copy.span.queue->reached(kToHost, copy.until.to_host);
  };
  if (std::ranges::all_of(inputs_, arrived) && std::ranges::all_of(outputs_, arrived)) return true;
  if (watch_.due()) look_for_loss();
  return false;
}

void StagedCopies::look_for_loss() {
  try {
    for (const std::vector<Copy>* copies : {&inputs_, &outputs_})
      if (!copies->empty()) copies->front().span.queue->look_for_loss();
  } catch (const Error& error) {
    throw on_rank(error, rank_);
  }
}

std::string StagedCopies::awaited() const {
  const Copy& first = inputs_.empty() ? outputs_.front() : inputs_.front();
  return "its arrays on device " + std::to_string(first.span.queue->device());
}

void StagedCopies::fail(const Error& error) {
  failure_ = on_rank(error, rank_);
  detector_->report(*failure_);
  if (auto verdict = detector_->verdict()) failure_ = std::move(verdict);  // another rank was first
  throw Error(*failure_);
}

void StagedCopies::take_back() {
  const std::lock_guard lock(mutex_);
  if (failure_) throw Error(*failure_);
  if (std::exchange(taken_back_, true)) return;
  try {
    for (Copy& copy : outputs_) {
      copy.until.lost = true;
      copy.span.queue->copy_to_device(copy.span.address, copy.block->pages, copy.span.bytes);
    }
    std::map<const DeviceQueue*, uint32_t> marks;
    for (Copy& copy : outputs_) {
      const auto [mark, is_new] = marks.try_emplace(copy.span.queue.get(), 0);
      if (is_new) mark->second = copy.span.queue->mark(kToDevice);
      copy.until.to_device = mark->second;
      copy.until.has_to_device = true;
      copy.until.lost = false;
    }
  } catch (const Error& error) {
    fail(error);
  }
  give_back();
}

void StagedCopies::hand_over(int device, std::optional<uint64_t> stream) {
  const std::lock_guard lock(mutex_);
  const auto on_it = [&](const Copy& copy) { return copy.span.queue->device() == device; };
  const auto output = std::ranges::find_if(outputs_, on_it);
  if (output == outputs_.end()) return;
  try {
    if (stream)
      output->span.queue->precede(*stream);
    else
      output->span.queue->synchronize(kToDevice);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) throw;  // that stream is being captured
    fail(error);
  }
  handed_over_ = true;
}

}  // namespace farandole
