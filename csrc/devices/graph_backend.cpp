#include "devices/graph_backend.h"

#include <bit>
#include <utility>

#include "devices/staged_copies.h"

namespace farandole {

GraphBackend::GraphBackend(Engine& engine, const Membership& membership, uint64_t key,
                           std::shared_ptr<DeviceExchange> exchange, PeerOffer bucket,
                           size_t piece_bytes, Duration timeout)
    : host_(engine.host()),
      membership_(membership),
      exchange_(std::move(exchange)),
      piece_bytes_(piece_bytes),
      watch_(engine, membership, exchange_, timeout) {
  meeting_.emplace(
      host_, membership_, key, std::move(bucket),
      [this](std::span<const PeerOffered> all) { exchange_->map_all(membership_.rank, all); },
      [this] { return exchange_->check_links(); });
}

void GraphBackend::start(const Operation& operation, uint32_t sequence) {
  operation_ = &operation;
  sequence_ = sequence;
}

Progress GraphBackend::poll(TimePoint) {
  if (left_) throw left_world();
  if (meeting_) {
    const bool moved = meeting_->poll();
    if (!meeting_->done()) return moved ? Progress::moved : Progress::idle;
    no_buckets_ = meeting_->refusal();
    if (no_buckets_.empty()) exchange_->heed(meeting_->notes());
    meeting_.reset();
  }
  if (no_buckets_.empty()) capture();
  return Progress::finished;
}

void GraphBackend::capture() {
  const Operation& o = *operation_;
  const Shape shape = shape_of(o, membership_.rank, static_cast<int>(membership_.members.size()));
  StepPieces pieces(o, shape, *arrays_, piece_bytes_);
  try {
    exchange_->captured().begin(std::bit_cast<cuda::StreamHandle>(*arrays_->graph),
                                watch_.add(title_of(o, sequence_)));
    for (size_t i = 0; i < pieces.size(); ++i) exchange_->run(pieces[i]);
    exchange_->captured().end();
  } catch (const Error& error) {
    throw on_rank(error, host_.rank);
  }
  arrays_->launched.store(true, std::memory_order_release);  // partner: StepCall::hand_over
}

void GraphBackend::leave() {
  left_ = true;
  watch_.end();
}

std::vector<int> GraphBackend::lacking() const {
  return meeting_ ? meeting_->silent() : std::vector<int>();
}

}  // namespace farandole
