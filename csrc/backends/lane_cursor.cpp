#include "backends/lane_cursor.h"

#include <algorithm>
#include <cstdint>

#include "base/fault.h"

namespace farandole {

std::byte* LaneWork::at(const Slice& slice) const {
  std::byte* const spaces[] = {input, output, scratch};
  std::byte* space = spaces[static_cast<size_t>(slice.space)];
  return slice.count == 0 ? space : space + slice.offset * size_of(dtype);
}

Progress LaneCursor::poll() {
  size_t budget = kPieceBytes;
  bool moved = false;
  while (step_ < lane_->size()) {
    const Step& step = (*lane_)[step_];
    moved |= offer(step);
    moved |= move(step, budget);
    if (!done(step)) {
      if (!moved) (void)all_drained();
      return moved ? Progress::moved : Progress::idle;
    }
    begin_next();
    moved = true;
    if (budget == 0) break;
  }
  if (step_ < lane_->size()) return Progress::moved;
  return all_drained() ? Progress::finished : moved ? Progress::moved : Progress::idle;
}

/// Of what channels have copied. Each is asked, as that moves its bytes on: a rank that waits for
/// one channel's bytes may be what another channel's wait for.
bool LaneCursor::all_drained() const {
  bool all = true;
  for (const std::unique_ptr<Channel>& channel : channels_)
    if (channel && channel->copies()) all &= channel->drained();
  return all;
}

void LaneCursor::begin_next() {
  ++step_;
  received_ = 0;
  offered_ = false;
  if (sending_ >= step_) return;
  sending_ = step_;
  sent_ = 0;
}

bool LaneCursor::move(const Step& step, size_t& budget) {
  fault_point("lane.move");
  if (step.to == work_->rank && step.from == work_->rank) {
    const size_t moved = run_locally(step, budget);
    budget -= moved;
    return moved > 0;
  }
  bool any = false;
  for (;;) {
    // Sending first: the peer works on it while we fold.
    const size_t sent = send(budget);
    budget -= std::min(budget, sent);
    const size_t received = receive(step, budget);
    budget -= received;
    if (sent + received == 0) return any;
    any = true;
  }
}

bool LaneCursor::done(const Step& step) const {
  return has_sent(step) && (step.from == kNobody || received_ == work_->bytes(step.recv));
}

/// `step` is step_.
bool LaneCursor::has_sent(const Step& step) const {
  if (!sends(step) || sending_ > step_) return true;
  return sent_ == work_->bytes(step.send) && !channel(step.to).refers();
}

/// To another rank.
bool LaneCursor::sends(const Step& step) const {
  return step.to != kNobody && step.to != work_->rank;
}

/// All of the step is sent, and the memory is free; so the next one may be sent already, though
/// this one still receives.
bool LaneCursor::may_go_ahead() const {
  if (sending_ + 1 >= lane_->size()) return false;
  const Step& step = (*lane_)[sending_];
  if (!sends(step)) return true;
  const Channel& sink = channel(step.to);
  return sent_ == work_->bytes(step.send) && sink.copies() && !sink.refers();
}

/// Bytes of what the step `sending_` sends that no earlier step is still to write.
size_t LaneCursor::ready_to_send() const {
  const Step& step = (*lane_)[sending_];
  const auto begin = reinterpret_cast<uintptr_t>(work_->at(step.send));
  size_t ready = work_->bytes(step.send);
  for (size_t i = step_; i < sending_; ++i) {
    const Step& earlier = (*lane_)[i];
    if (earlier.from == kNobody) continue;
    const auto place = reinterpret_cast<uintptr_t>(work_->at(earlier.recv));
    const uintptr_t unset = place + (i == step_ ? received_ : 0);
    const uintptr_t end = place + work_->bytes(earlier.recv);
    if (unset < end && unset < begin + ready && begin < end)
      ready = unset > begin ? unset - begin : 0;
  }
  return ready;
}

size_t LaneCursor::send(size_t budget) {
  while (may_go_ahead()) {
    ++sending_;
    sent_ = 0;
  }
  const Step& step = (*lane_)[sending_];
  if (!sends(step) || (sending_ > step_ && !channel(step.to).copies())) return 0;
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

/// True when it has: a sender that sleeps is to be woken. Also where nothing shall be put: the
/// sender waits for the answer.
bool LaneCursor::offer(const Step& step) {
  if (offered_ || step.from == kNobody || step.from == work_->rank) return false;
  Channel& source = channel(step.from);
  const PlaceRule rule = source.place_rule();
  if (!is_offered(rule, step.recv)) return false;
  const bool wanted = only_moves(step) && (exchanges(step) || !rule.of_exchanges);
  source.offer(wanted ? work_->at(step.recv) : nullptr, work_->bytes(step.recv));
  return offered_ = true;
}

/// The same for both ends of a transfer.
bool LaneCursor::is_offered(const PlaceRule& rule, const Slice& slice) const {
  return work_->bytes(slice) >= rule.shortest && (work_->memory != nullptr || !rule.by_visits);
}

size_t LaneCursor::receive(const Step& step, size_t budget) {
  if (step.from == kNobody) return 0;
  const size_t want = std::min(budget, work_->bytes(step.recv) - received_);
  if (want == 0) return 0;
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

size_t LaneCursor::run_locally(const Step& step, size_t budget) {
  const size_t element = size_of(work_->dtype);
  const size_t count = std::min(budget, work_->bytes(step.recv) - received_) / element;
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
  if (step_ == lane_->size()) return kNobody;
  const Step& step = (*lane_)[step_];
  const bool receives = step.from != kNobody && received_ < work_->bytes(step.recv);
  return receives ? step.from : step.to;
}

void LaneCursor::add_lacking(std::vector<int>& ranks) const {
  if (step_ == lane_->size()) {
    for (size_t r = 0; r < channels_.size(); ++r)
      if (channels_[r] && !channels_[r]->drained()) ranks.push_back(static_cast<int>(r));
    return;
  }
  const Step& step = (*lane_)[step_];
  if (step.from != kNobody && step.from != work_->rank && received_ < work_->bytes(step.recv))
    ranks.push_back(step.from);
  if (!has_sent(step)) ranks.push_back(step.to);
}

size_t LaneCursor::bytes_done() const {
  if (sending_ == step_ || step_ == lane_->size()) return sent_ + received_;
  const Step& step = (*lane_)[step_];
  return received_ + (sends(step) ? work_->bytes(step.send) : 0);
}

size_t LaneCursor::bytes_total() const {
  if (step_ == lane_->size()) return 0;
  const Step& step = (*lane_)[step_];
  return (sends(step) ? work_->bytes(step.send) : 0) +
         (step.from == kNobody ? 0 : work_->bytes(step.recv));
}

}  // namespace farandole
