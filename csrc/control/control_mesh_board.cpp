// Questions between ranks on several hosts: how far streams are, what a rank waits in, what time it
// is.

#include <algorithm>
#include <utility>

#include "control/control_mesh.h"
#include "control/control_messages.h"
#include "control/wait_watch.h"
#include "control/waits_elsewhere.h"

namespace farandole {

// ---- how far streams are; any thread ----

void ControlMesh::show(uint64_t stream_key, const StreamProgress& mine) {
  const Lock lock(mutex_);
  StreamProgress& shown = streams_[stream_key] = mine;
  shown.holdups.resize(std::min(shown.holdups.size(), kMostHoldups));
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

void ControlMesh::ask(uint64_t stream_key, uint64_t fate, int world_rank) {
  const Lock lock(mutex_);
  if (!peer(world_rank).open) return;
  send(world_rank, frame_of<QuestionMessage>(stream_key, fate));
}

void ControlMesh::answer_question(int rank, WireReader& from) {
  const auto asked = get_message<QuestionMessage>(from);
  StreamAnswer answer;
  const Lock lock(mutex_);
  if (const auto mine = streams_.find(asked.key); mine != streams_.end())
    answer.progress = mine->second;
  answer.closed = std::ranges::find(closed_groups_, asked.fate) != closed_groups_.end();
  send(rank, frame_of<AnswerMessage>(asked.key, answer));
}

void ControlMesh::take_answer(int rank, WireReader& from) {
  auto told = get_message<AnswerMessage>(from);
  if (told.answer == StreamAnswer{}) return;
  const Lock lock(mutex_);
  StreamAnswer& known = answers_[{told.key, rank}];
  if (!told.answer.progress) told.answer.progress = known.progress;  // it has forgotten the stream
  if (known == told.answer) return;  // nobody wakes for what is no news
  known = std::move(told.answer);
  ring(doorbell_.get());
}

StreamAnswer ControlMesh::told(uint64_t stream_key, int world_rank) const {
  const Lock lock(mutex_);
  const auto found = answers_.find({stream_key, world_rank});
  return found == answers_.end() ? StreamAnswer{} : found->second;
}

// ---- what a rank waits in ----

void ControlMesh::ask_waits(int world_rank) {
  const Lock lock(mutex_);
  if (!peer(world_rank).open) return;
  send(world_rank, frame_of<LookMessage>(nanoseconds_now()));
}

void ControlMesh::tell_deadlock(int world_rank, const ErrorRecord& record, int64_t stands) {
  const Lock lock(mutex_);
  if (!peer(world_rank).open) return;
  send(world_rank, frame_of<DeadlockMessage>(stands, record));
}

/// Answers with the board as it is; the watch looks anew, for the next answer.
void ControlMesh::answer_look(int rank, WireReader& from) {
  WaitBoard& mine = segment_->page(rank_).board;
  ask_watch(mine);
  FrameWriter answer = frame_of<WaitsMessage>(get_message<LookMessage>(from).asked);
  put_waits(answer, mine);
  const Lock lock(mutex_);
  send(rank, std::move(answer));
}

void ControlMesh::take_waits_of(int rank, WireReader& from) {
  const TimePoint asked(Duration(get_message<WaitsMessage>(from).asked));
  take_waits(from, asked, segment_->page(rank).board);
}

void ControlMesh::take_deadlock(WireReader& from) {
  const auto told = get_message<DeadlockMessage>(from);
  put_verdict(segment_->page(rank_).board, told.record, told.stands);
  ring(doorbell_.get());
}

// ---- what time it is ----

void ControlMesh::answer_ping(int rank, WireReader& from) {
  const int64_t arrived = nanoseconds_now();
  const auto told = get_message<PingMessage>(from);
  const Lock lock(mutex_);
  peer(rank).line.acknowledge(told.taken);
  send(rank, frame_of<PongMessage>(told.sent, arrived, nanoseconds_now()));
}

void ControlMesh::take_pong(WireReader& from) {
  const int64_t back = nanoseconds_now();
  const auto told = get_message<PongMessage>(from);
  RoundTrip trip;
  trip.back = back;
  trip.sent = told.sent;
  trip.arrived = told.arrived;
  trip.answered = told.answered;
  clock_.add(trip);
  const Lock lock(mutex_);
  if (clock_.is_new() && peer(0).open) send_beat(0);  // the first ones at once: jobs may be short
}

}  // namespace farandole
