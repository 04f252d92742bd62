// What ranks of a world of several hosts tell each other besides operations: that they leave, and
// why; how far their streams are, and what they wait in; that a group has failed, and the verdict.
// A connection between each two ranks, and one thread, which never waits for whoever polls.
//
// Note [Verdict between hosts]
//
// A rank that sees a failure stops the group here and reports it to the group's lowest member that
// is still connected. The first report that this one gets is the verdict; it tells all members. A
// report whose judge is lost before it has answered goes to the next one. A verdict is for ever:
// who reports later is told it.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/wire.h"
#include "control/clock_log.h"
#include "control/failure_detector.h"
#include "control/progress_board.h"
#include "transport/tcp_door.h"

namespace farandole {

class ControlMesh : public ProgressBoard {
 public:
  /// `here`: by world rank, which ranks map `segment`. Connects to all others without waiting.
  ControlMesh(std::shared_ptr<Segment> segment, int rank, std::vector<bool> here,
              std::shared_ptr<TcpDoor> door);
  ~ControlMesh() override;
  ControlMesh(const ControlMesh&) = delete;
  ControlMesh& operator=(const ControlMesh&) = delete;

  /// Blocks until every rank is connected, then starts the thread. `doorbell` (an eventfd) is rung
  /// when there is news. Throws Error(rendezvous) naming who is missing at the deadline.
  void meet(int doorbell, Deadline deadline, const std::function<void()>& interrupted);

  const std::shared_ptr<TcpDoor>& door() const { return door_; }
  /// Its connection has ended, though it had not said that it leaves.
  bool has_lost(int rank) const { return peer(rank).lost.load(std::memory_order_acquire); }

  /// By how much this host's clock is ahead of rank 0's; without a reading where they share one.
  ClockLog& clock() { return clock_; }

  /// Any thread: tells all others this rank's state and farewell, as they stand in its page.
  void tell_state();

  // ---- failures: see the note; any thread ----

  /// From now on `cell` is where this rank learns of the verdict on group `key`.
  void adopt(uint64_t key, std::shared_ptr<FailureRecord> cell);
  void drop(uint64_t key);
  void report(uint64_t key, const std::vector<int>& members, const ErrorRecord& record);

  // ---- what ranks wait in (control/wait_watch.h); any thread; control_mesh_board.cpp ----

  /// Asks a rank elsewhere what it shows; the answer comes into the board that stands for it here.
  void ask_waits(int world_rank);
  void tell_deadlock(int world_rank, const ErrorRecord& record, int64_t stands);

  // ---- ProgressBoard; control_mesh_board.cpp ----

  void show(uint64_t stream_key, const StreamProgress& mine) override;
  void forget(uint64_t stream_key) override;
  void ask(uint64_t stream_key, int world_rank) override;
  std::optional<StreamProgress> told(uint64_t stream_key, int world_rank) const override;
  bool has_finished(int rank) const override {
    return peer(rank).finished.load(std::memory_order_acquire);
  }

  /// In a forked child: what is its parent's is closed.
  void close_descriptors();

 private:
  enum class Frame : uint8_t {
    beat,
    ping,  // what time is it there?
    pong,
    state,  // of a rank, and of its streams
    report,
    verdict,
    question,  // how far is a stream?
    answer,
    look,  // what does the rank wait in?
    waits,
    deadlock
  };
  struct Peer {
    bool here = false;
    std::shared_ptr<TcpArrival> arrival;  // until it is connected
    Fd socket;
    std::atomic<bool> lost{false}, finished{false};
    bool open = false;  // guarded by mutex_, as what follows
    std::deque<std::vector<std::byte>> outgoing;
    size_t sent = 0;                // of the first of them
    std::vector<std::byte> coming;  // of the thread alone
  };
  struct Report {
    uint64_t key;
    std::vector<int> members;
    ErrorRecord record;
    int judge;
  };
  using Lock = std::unique_lock<std::mutex>;

  Peer& peer(int rank) const { return *peers_[static_cast<size_t>(rank)]; }
  void main();
  void look(int timeout_ms);
  bool flush(Peer& to);
  void flush_all();
  void read(int rank);
  void take_frames(int rank);
  void take(int rank, WireReader& from);
  void take_state(int rank, WireReader& from);
  void answer_look(int rank, WireReader& from);
  void answer_ping(int rank, WireReader& from);
  void take_pong(WireReader& from);
  void lose(int rank);
  // With mutex_ held.
  void send(int rank, WireWriter frame);
  void send_beat(int rank);
  int judge_of(const std::vector<int>& members) const;
  void put_before_judge(Report report);
  void judge(const Report& report);
  void deliver(uint64_t key);
  WireWriter state_frame() const;

  std::shared_ptr<Segment> segment_;
  const int rank_;
  std::shared_ptr<TcpDoor> door_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by world rank; this one's has no connection
  int doorbell_ = -1;
  Fd epoll_, wake_;
  TimePoint next_beat_{};
  ClockLog clock_;

  mutable std::mutex mutex_;  // guards these
  std::map<uint64_t, StreamProgress> streams_;
  std::deque<uint64_t> closed_;  // of those: who is slower may ask for a while
  std::map<std::pair<uint64_t, int>, StreamProgress> answers_;
  std::map<uint64_t, std::shared_ptr<FailureRecord>> cells_;
  std::map<uint64_t, ErrorRecord> verdicts_;
  std::vector<Report> reports_;  // without an answer

  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: all else is there
};

}  // namespace farandole
