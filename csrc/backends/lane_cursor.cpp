#include "backends/lane_cursor.h"

#include <algorithm>
#include <cstdint>

#include "base/fault.h"

namespace farandole {
namespace {

/// How many of `count` bytes at `wanted` come before the first of the bytes from `from` to `end`.
size_t before(const std::byte* wanted, size_t count, const std::byte* from, const std::byte* end) {
  const auto begin = reinterpret_cast<uintptr_t>(wanted);
  const auto taken = reinterpret_cast<uintptr_t>(from);
  const auto taken_end = reinterpret_cast<uintptr_t>(end);
  if (taken >= taken_end || taken >= begin + count || begin >= taken_end) return count;
  return taken > begin ? taken - begin : 0;
}

}  // namespace

std::byte* LaneWork::at(const Slice& slice) const {
  std::byte* const spaces[] = {input, output, scratch};
  std::byte* space = spaces[static_cast<size_t>(slice.space)];
  return slice.count == 0 ? space : space + slice.offset * size_of(dtype);
}

Progress LaneCursor::poll() {
  size_t budget = kPieceBytes;
  const bool moved = move(budget);
  if (step() < lane_->size()) {
    if (!moved) (void)all_drained();
    return moved ? Progress::moved : Progress::idle;
  }
  return all_drained() ? Progress::finished : moved ? Progress::moved : Progress::idle;
}

/// Whether channels that copy have drained. Each is asked, since that moves its bytes on: a peer
/// that waits for one channel's bytes may hold up another channel.
bool LaneCursor::all_drained() const {
  bool all = true;
  for (const std::unique_ptr<Channel>& channel : channels_)
    if (channel && channel->copies()) all &= channel->drained();
  return all;
}

bool LaneCursor::move(size_t& budget) {
  fault_point("lane.move");
  bool any = false;
  for (;;) {
    const bool went_on = go_on(), offered = offer();
    // Sending first: the peer works on it while we fold.
    const size_t sent = send(budget);
    budget -= std::min(budget, sent);
    const size_t received = receive(budget);
    budget -= received;
    if (!went_on && !offered && sent + received == 0) return any;
    any = true;
  }
}

/// True when sending or receiving has come to another step.
bool LaneCursor::go_on() {
  const size_t size = lane_->size();
  const size_t was = sending_ + receiving_;
  // Each passes a step where the other is further, or has done its part of it, or need not have.
  while (sending_ < size && has_sent() &&
         (sending_ < receiving_ || lets_run_ahead((*lane_)[sending_]) ||
          (sending_ == receiving_ && has_received()))) {
    ++sending_;
    sent_ = 0;
  }
  while (receiving_ < size && has_received() &&
         (receiving_ < sending_ || lets_run_ahead((*lane_)[receiving_]))) {
    ++receiving_;
    received_ = 0;
    offered_ = false;
  }
  return sending_ + receiving_ > was;
}

/// Whether all of step sending_ is sent, and its memory is free.
bool LaneCursor::has_sent() const {
  const Step& step = (*lane_)[sending_];
  return !sends(step) || (sent_ == work_->bytes(step.send) && !channel(step.to).refers());
}

bool LaneCursor::has_received() const {
  const Step& step = (*lane_)[receiving_];
  return step.from == kNobody || received_ == work_->bytes(step.recv);
}

/// Whether sending and receiving may be on different sides of the step.
bool LaneCursor::lets_run_ahead(const Step& step) const {
  return !sends(step) || channel(step.to).copies();
}

/// Whether the step sends to another rank.
bool LaneCursor::sends(const Step& step) const {
  return step.to != kNobody && step.to != work_->rank;
}

/// Bytes that step sending_ may send: no earlier step has still to write them.
size_t LaneCursor::ready_to_send() const {
  const Step& step = (*lane_)[sending_];
  size_t ready = work_->bytes(step.send);
  for (size_t i = receiving_; i < sending_; ++i) {
    const Step& earlier = (*lane_)[i];
    if (earlier.from == kNobody) continue;
    const std::byte* place = work_->at(earlier.recv);
    ready = before(work_->at(step.send), ready, place + (i == receiving_ ? received_ : 0),
                   place + work_->bytes(earlier.recv));
  }
  return ready;
}

/// Bytes that step receiving_ may write: no earlier step has still to send them.
size_t LaneCursor::ready_to_receive() const {
  const Step& step = (*lane_)[receiving_];
  size_t ready = work_->bytes(step.recv);
  for (size_t i = sending_; i < receiving_; ++i) {
    const Step& earlier = (*lane_)[i];
    if (!sends(earlier)) continue;
    const std::byte* place = work_->at(earlier.send);
    const size_t free = i == sending_ && !channel(earlier.to).refers() ? sent_ : 0;
    ready = before(work_->at(step.recv), ready, place + free, place + work_->bytes(earlier.send));
  }
  return ready;
}

size_t LaneCursor::send(size_t budget) {
  if (sending_ == lane_->size()) return 0;
  const Step& step = (*lane_)[sending_];
  if (!sends(step) || (sending_ > receiving_ && !channel(step.to).copies())) return 0;
  Channel& sink = channel(step.to);
  const PlaceRule rule = sink.place_rule();
  const bool asks = is_offered(rule, step.send) && (exchanges(step) || !rule.of_exchanges);
  const bool copied = rule.by_visits || !asks;  // else it costs nothing of this turn
  const size_t ready = ready_to_send() - sent_;
  const size_t want = copied || budget == 0 ? std::min(budget, ready) : ready;
  if (want == 0) return 0;
  const std::span<const std::byte> bytes{work_->at(step.send) + sent_, want};
  const size_t taken = asks ? put(sink, bytes) : sink.write(bytes);
  sent_ += taken;
  return taken;
}

size_t LaneCursor::put(Channel& sink, std::span<const std::byte> bytes) {
  const auto place = sink.place_for(bytes);
  if (!place) return 0;
  if (place->empty()) return sink.write(bytes);
  const Visit visit(*work_->memory);
  if (!visit.welcome()) return 0;
  fault_point("put.write");
  copy_bytes(place->data(), bytes.data(), place->size());
  sink.delivered(place->size());
  return place->size();
}

/// Offers the place where step receiving_ wants its bytes. True when it did: a sender that sleeps
/// has to be woken. An empty offer is made if nothing shall be put, as the sender waits for one.
bool LaneCursor::offer() {
  if (offered_ || receiving_ == lane_->size()) return false;
  const Step& step = (*lane_)[receiving_];
  if (step.from == kNobody || step.from == work_->rank) return false;
  Channel& source = channel(step.from);
  const PlaceRule rule = source.place_rule();
  const size_t bytes = work_->bytes(step.recv);
  if (!is_offered(rule, step.recv) || ready_to_receive() < bytes) return false;
  const bool wanted = only_moves(step) && (exchanges(step) || !rule.of_exchanges);
  source.offer(wanted ? work_->at(step.recv) : nullptr, bytes);
  return offered_ = true;
}

/// The same for both ends of a transfer.
bool LaneCursor::is_offered(const PlaceRule& rule, const Slice& slice) const {
  return work_->bytes(slice) >= rule.shortest && (work_->memory != nullptr || !rule.by_visits);
}

size_t LaneCursor::receive(size_t budget) {
  if (receiving_ == lane_->size()) return 0;
  const Step& step = (*lane_)[receiving_];
  if (step.from == kNobody) return 0;
  const size_t want = std::min(budget, ready_to_receive() - received_);
  if (want == 0) return 0;
  if (step.from == work_->rank) return run_locally(step, want);
  Channel& source = channel(step.from);
  if (only_moves(step)) {
    const size_t got = source.read({work_->at(step.recv) + received_, want});
    received_ += got;
    return got;
  }
  const size_t element = size_of(work_->dtype);
  const std::span<const std::byte> arrived = source.peek(element);
  const size_t count = std::min(arrived.size(), want) / element;
  if (count == 0) return 0;
  take(step, arrived.data(), count);
  source.consume(count * element);
  received_ += count * element;
  return count * element;
}

size_t LaneCursor::run_locally(const Step& step, size_t want) {
  const size_t element = size_of(work_->dtype);
  const size_t count = want / element;
  if (count == 0) return 0;
  take(step, work_->at(step.send) + received_, count);
  received_ += count * element;
  return count * element;
}

/// Stores or folds the next `count` elements of the step.
void LaneCursor::take(const Step& step, const std::byte* arrived, size_t count) {
  std::byte* out = work_->at(step.recv) + received_;
  if (step.action == Action::store) {
    store_step(out, arrived, step.leaf_arrived, step.finish, count, work_->dtype, work_->scales);
    return;
  }
  const std::byte* held = step.held.count == 0 ? out : work_->at(step.held) + received_;
  const Side arrived_is = step.action == Action::fold_upper ? Side::upper : Side::lower;
  fold_step(out, arrived, arrived_is, step.leaf_arrived, held, step.leaf_held, step.finish, count,
            work_->dtype, work_->op, work_->scales);
}

bool LaneCursor::exchanges(const Step& step) const {
  return step.to != kNobody && step.from != kNobody;
}

/// True when the bytes arrive as they shall lie.
bool LaneCursor::only_moves(const Step& step) const {
  return step.action == Action::store && (!step.leaf_arrived || work_->scales.leaf.is_identity()) &&
         (!step.finish || work_->scales.finish.is_identity());
}

int LaneCursor::peer() const {
  if (step() == lane_->size()) return kNobody;
  const Step& first = (*lane_)[step()];
  return receiving_ == step() && !has_received() ? first.from : first.to;
}

void LaneCursor::add_lacking(std::vector<int>& ranks) const {
  if (step() == lane_->size()) {
    for (size_t r = 0; r < channels_.size(); ++r)
      if (channels_[r] && !channels_[r]->drained()) ranks.push_back(static_cast<int>(r));
    return;
  }
  const Step& first = (*lane_)[step()];
  if (receiving_ == step() && first.from != work_->rank && !has_received())
    ranks.push_back(first.from);
  if (sending_ == step() && !has_sent()) ranks.push_back(first.to);
}

size_t LaneCursor::bytes_done() const {
  if (step() == lane_->size()) return 0;
  const Step& first = (*lane_)[step()];
  const size_t sent = sending_ == step() ? sent_ : sends(first) ? work_->bytes(first.send) : 0;
  const size_t coming = first.from == kNobody ? 0 : work_->bytes(first.recv);
  return sent + (receiving_ == step() ? received_ : coming);
}

size_t LaneCursor::bytes_total() const {
  if (step() == lane_->size()) return 0;
  const Step& first = (*lane_)[step()];
  return (sends(first) ? work_->bytes(first.send) : 0) +
         (first.from == kNobody ? 0 : work_->bytes(first.recv));
}

}  // namespace farandole
