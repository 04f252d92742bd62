// What ranks on several hosts ask of each other: how far streams are, what a rank waits in, what
// time it is.

#include "control/control_mesh.h"
#include "control/wait_watch.h"
#include "control/waits_elsewhere.h"

namespace farandole {
namespace {

constexpr size_t kMostClosed = 4096;  // streams

}  // namespace

// ---- how far streams are; any thread ----

void ControlMesh::show(uint64_t stream_key, const StreamProgress& mine) {
  const Lock lock(mutex_);
  streams_[stream_key] = mine;
}

void ControlMesh::forget(uint64_t stream_key) {
  const Lock lock(mutex_);
  closed_.push_back(stream_key);
  if (closed_.size() > kMostClosed) {
    streams_.erase(closed_.front());
    closed_.pop_front();
  }
  const auto first = answers_.lower_bound({stream_key, 0});
  auto last = first;
  while (last != answers_.end() && last->first.first == stream_key) ++last;
  answers_.erase(first, last);
}

void ControlMesh::ask(uint64_t stream_key, int world_rank) {
  const Lock lock(mutex_);
  if (!peer(world_rank).open) return;
  WireWriter question;
  question.put(Frame::question);
  question.put(stream_key);
  send(world_rank, std::move(question));
}

std::optional<StreamProgress> ControlMesh::told(uint64_t stream_key, int world_rank) const {
  const Lock lock(mutex_);
  const auto found = answers_.find({stream_key, world_rank});
  return found == answers_.end() ? std::nullopt : std::optional(found->second);
}

// ---- what a rank waits in ----

void ControlMesh::ask_waits(int world_rank) {
  const Lock lock(mutex_);
  if (!peer(world_rank).open) return;
  WireWriter question;
  question.put(Frame::look);
  question.put(nanoseconds_now());
  send(world_rank, std::move(question));
}

void ControlMesh::tell_deadlock(int world_rank, const ErrorRecord& record, int64_t stands) {
  const Lock lock(mutex_);
  if (!peer(world_rank).open) return;
  WireWriter frame;
  frame.put(Frame::deadlock);
  frame.put(stands);
  encode(record, frame);
  send(world_rank, std::move(frame));
}

/// With what it shows so far; its watch looks anew, for the next answer.
void ControlMesh::answer_look(int rank, WireReader& from) {
  WaitBoard& mine = segment_->page(rank_).board;
  ask_watch(mine);
  WireWriter answer;
  answer.put(Frame::waits);
  answer.put(from.get<int64_t>());
  put_waits(answer, mine);
  const Lock lock(mutex_);
  send(rank, std::move(answer));
}

// ---- what time it is ----

void ControlMesh::answer_ping(int rank, WireReader& from) {
  const auto sent = from.get<int64_t>();
  const int64_t arrived = nanoseconds_now();
  const Lock lock(mutex_);
  WireWriter pong;
  pong.put(Frame::pong);
  pong.put(sent);
  pong.put(arrived);
  pong.put(nanoseconds_now());
  send(rank, std::move(pong));
}

void ControlMesh::take_pong(WireReader& from) {
  RoundTrip trip;
  trip.back = nanoseconds_now();
  trip.sent = from.get<int64_t>();
  trip.arrived = from.get<int64_t>();
  trip.answered = from.get<int64_t>();
  clock_.add(trip);
  const Lock lock(mutex_);
  if (clock_.is_new() && peer(0).open) send_beat(0);  // the first ones at once: jobs may be short
}

}  // namespace farandole
