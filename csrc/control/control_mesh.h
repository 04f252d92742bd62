// Messages besides operations between ranks of a world of several hosts: that a rank leaves, and
// why; how far its streams are, and what it waits in; that a group has failed, and the verdict.
// Each two ranks have a connection. One thread serves them, and never waits for the polling thread.
//
// Note [Verdict between hosts]
//
// A rank that sees a failure stops the group here, and its report goes to the group's judge: its
// lowest member that can be heard. The first report that the judge gets is the verdict, which it
// tells all members. A verdict is for ever: a rank that reports later is told it.
//
// Two ranks may lose sight of each other: nothing comes any more, though both live, and others may
// hear both. So each tells the others which ranks it has lost sight of. A rank is heard if there is
// a way to it, from rank to rank: each one on the way passes a report on, and verdicts are passed
// on to ranks that do not hear the judge. Ranks that hear each other at all have one judge and one
// verdict. If the network has fallen apart, each part has its own.
//
// Views differ for a while. A report is kept until the verdict comes, and whenever its way has
// become another one, it goes that way, too. Nothing is judged before all messages that have come
// are read: a rank that was stopped finds the verdict of those that went on without it. A rank that
// has been silent for long is passed over as a judge (it may be stopped), but is not lost.
//
// Note [How a rank elsewhere has ended]
//
// A connection that ends says that a rank is dead, not how. Ranks on its host see how, by its
// process descriptor, and tell all others; `farandole run`, which is its parent, tells every host's
// ranks. So a rank that sees the end of a connection waits a moment for that message, where one may
// come.
//
// Note [A rank elsewhere is stopped]
//
// A stopped process keeps its connections, and its kernel acknowledges what comes. Only its host
// can tell that it is stopped. So a rank of which nothing has come for some beats is looked at by
// those that share its host, and they tell the other hosts which ranks are stopped, until that
// ends.
//
// Note [What the end of a connection means]
//
// The rank may be dead, or something between the hosts has reset the connection, or the other end
// hears nothing of us. So this rank knocks where the other listens. Refused: that rank is dead, as
// its kernel would accept even if the rank were stopped. Accepted: it lives, the lower rank dials
// again, and both resend what the other lacks (Note [A line outlives its connection]). The
// connection counts as made again once the other end's first message has come on it, as that rank
// may have given up meanwhile. If none comes, it is the link that is lost. No answer: the host is
// out of sight.
//
// Likewise where nothing comes any more. Beats must be acknowledged, by the kernel at least. They
// may be stuck behind data on a slow way, so bytes that move on any connection between the two
// hosts are evidence as good, and ranks of a host share it (Segment::heard_of).
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/wire.h"
#include "control/clock_log.h"
#include "control/control_line.h"
#include "control/deaths.h"
#include "control/failure_detector.h"
#include "control/host.h"
#include "control/launcher.h"
#include "control/progress_board.h"
#include "transport/tcp_door.h"

namespace farandole {

/// Why a rank elsewhere counts as lost.
enum class Loss : uint8_t {
  none,
  died,
  silent,  // nothing comes any more, not even from its kernel: it may be cut off, and live
  link     // it lives, and no connection to it lasts
};

struct ControlMeshOptions {
  bool hides = false;                                       // messages are encrypted
  Duration most_silence = std::chrono::milliseconds(1500);  // FARANDOLE_LINK_TIMEOUT
};

class ControlMesh : public ProgressBoard {
 public:
  /// `here`: by world rank, which ranks map `segment`. Connects to all others without waiting.
  ControlMesh(std::shared_ptr<Segment> segment, int rank, std::vector<bool> here,
              std::shared_ptr<TcpDoor> door, ControlMeshOptions options = {});
  ~ControlMesh() override;
  ControlMesh(const ControlMesh&) = delete;
  ControlMesh& operator=(const ControlMesh&) = delete;

  /// Blocks until every rank is connected, then starts the thread. This rank's doorbell is rung
  /// when there is news. Throws Error(rendezvous) naming the ranks missing at the deadline.
  void meet(const Host& host, Deadline deadline, const std::function<void()>& interrupted);

  const std::shared_ptr<TcpDoor>& door() const { return door_; }
  /// Whether the rank's connection has ended though it had not said that it leaves.
  bool has_lost(int rank) const { return peer(rank).lost.load(std::memory_order_acquire); }
  /// Whether all has been read that the rank had sent before, and its connection is whole, or given
  /// up: else news of its end may be on the way.
  bool has_settled(int rank, TimePoint before) const {
    return peer(rank).settled.load(std::memory_order_acquire) >= before;
  }
  Loss loss_of(int rank) const { return peer(rank).loss.load(std::memory_order_acquire); }
  /// Whether the rank is lost to this one, but may live, and others may hear it.
  bool has_lost_sight_of(int rank) const {
    return loss_of(rank) == Loss::silent || loss_of(rank) == Loss::link;
  }

  /// Whether ranks that share its host say that it is stopped: see the note.
  bool is_stopped(int rank) const { return peer(rank).stopped.load(std::memory_order_relaxed); }

  /// Why nothing that it says is read any more: bytes came that no rank sends. Empty: it is.
  std::string distrust(int rank) const;

  /// How it has ended, if somebody has told: see the note.
  std::optional<Death> told_death(int rank) const;
  /// Whether the launcher may tell.
  bool hears_launcher() const { return hears_launcher_.load(std::memory_order_relaxed); }

  /// By how much this host's clock is ahead of rank 0's; without a reading where they share one.
  ClockLog& clock() { return clock_; }

  /// Any thread: tells all others this rank's state and farewell, as they stand in its page.
  void tell_state();
  /// The same, before the process ends: waits until it is on its way, for a moment.
  void tell_last_state();

  // ---- failures: see the note; any thread; control_mesh_verdicts.cpp ----

  /// From now on `cell` is where this rank learns of the verdict on group `key`.
  void adopt(uint64_t key, std::shared_ptr<FailureRecord> cell);
  void drop(uint64_t key);
  void report(uint64_t key, const std::vector<int>& members, const ErrorRecord& record);

  // ---- what ranks wait in (control/wait_watch.h); any thread; control_mesh_board.cpp ----

  /// Asks a rank elsewhere for its board; the answer is written to the copy of its board here.
  void ask_waits(int world_rank);
  void tell_deadlock(int world_rank, const ErrorRecord& record, int64_t stands);

  // ---- ProgressBoard; control_mesh_board.cpp ----

  void show(uint64_t stream_key, const StreamProgress& mine) override;
  void forget(uint64_t stream_key) override;
  void ask(uint64_t stream_key, uint64_t fate, int world_rank) override;
  StreamAnswer told(uint64_t stream_key, int world_rank) const override;
  bool has_finished(int rank) const override {
    return peer(rank).finished.load(std::memory_order_acquire);
  }

  /// Closes the parent's descriptors in a forked child.
  void close_descriptors();

 private:
  static constexpr auto kBeat = std::chrono::milliseconds(250);
  static constexpr size_t kMostClosed = 4096;  // streams, and groups
  struct Break {
    explicit Break(TimePoint when) : since(when), dial_at(when) {}
    TimePoint since, dial_at;
    Fd knock;
    bool answered = false;
  };
  struct Peer {
    bool here = false;
    size_t host = 0;                      // of those that share one: the first one's rank
    std::shared_ptr<TcpArrival> arrival;  // of its next connection, where one is awaited
    ControlLine line;                     // guarded by mutex_, but for what is read
    std::atomic<bool> lost{false}, finished{false};
    std::atomic<bool> stopped{false};             // if elsewhere, as it was told
    std::atomic<TimePoint> settled{TimePoint{}};  // see has_settled()
    bool open = false;                            // neither lost nor gone; guarded by mutex_
    TimePoint heard{};                            // of the thread alone, as what follows
    TcpTraffic traffic;                           // as it was last seen
    TcpTraffic data;                              // that of connections for data, likewise
    TimePoint acknowledged{};           // when its kernel last had all, or more than before
    TimePoint answered{};               // the same, or more of data
    std::optional<TcpAddress> listens;  // where this rank would knock
    std::optional<Break> broken;        // until the other end has begun on a new connection
    std::set<int> out_of_sight;         // ranks it hears no more, as it says; guarded by mutex_
    std::atomic<Loss> loss{Loss::none};
    std::string distrust;  // see there; guarded by mutex_
    Fd process;            // of a rank here
    pid_t pid = 0;
    std::optional<Death> death;  // as it was told; guarded by mutex_
  };
  struct Report {
    std::vector<int> members;
    ErrorRecord record;
    int by = -1;       // who has seen it
    int sent_to = -1;  // the first one on the way to its judge
  };
  using Lock = std::unique_lock<std::mutex>;

  Peer& peer(int rank) const { return *peers_[static_cast<size_t>(rank)]; }
  void main();
  int time_to_next() const;
  bool look(int timeout_ms);
  bool has_outgoing() const;
  void flush_all();
  void read(int rank);
  void take_messages(int rank);
  void take(int rank, WireReader& from);
  void take_resume(int rank, WireReader& from);
  void take_beat(int rank, WireReader& from);
  void take_state(int rank, WireReader& from);
  void take_report(int rank, WireReader& from);
  void take_verdict(int rank, WireReader& from);
  void take_lost_sight(int rank, WireReader& from);
  void take_deadlock(WireReader& from);
  void take_death(WireReader& from);
  void take_stops(int rank, WireReader& from);
  void watch_stops();
  void watch_ends();
  void note_end(int rank);
  void hear_launcher();
  void close_ear();
  int member_told(const ToldDeath& told) const;
  void answer_question(int rank, WireReader& from);
  void take_answer(int rank, WireReader& from);
  void answer_look(int rank, WireReader& from);
  void take_waits_of(int rank, WireReader& from);
  void answer_ping(int rank, WireReader& from);
  void take_pong(WireReader& from);
  void stop_reading(int rank, const Error& error);
  void forgive(Duration stall);
  // Connections, as they come and go: control_mesh_links.cpp.
  TcpLane lane_with(int rank) const;
  void begin_on(int rank, TcpConnection connection);
  void await_next(int rank);
  void take_arrival(int rank);
  void note_break(int rank, int error);
  void begin_break(int rank);
  void note_mended(int rank);
  void dial(int rank);
  void knock(int rank);
  void hear_knock(int rank);
  void mend();
  void lose(int rank, Loss loss);
  void watch_traffic(int rank);
  void note_heard(int rank);
  bool is_silent(int rank) const;
  bool is_stuck(int rank) const;
  void settle_reports();
  // With mutex_ held.
  void send(int rank, FrameWriter frame);
  void send_beat(int rank);
  void take_note(uint64_t key, Report report);
  void tell_lost_sight();
  bool hear_each_other(int a, int b) const;
  std::vector<int> ways() const;
  void pronounce(uint64_t key, const Report& report, const std::vector<int>& way);
  void deliver(uint64_t key);
  FrameWriter state_frame() const;

  std::shared_ptr<Segment> segment_;
  const int rank_;
  std::shared_ptr<TcpDoor> door_;
  const ControlMeshOptions options_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by world rank; this one's has no connection
  Fd doorbell_;  // a copy, as of processes: this may outlive the engine
  Fd epoll_;
  std::shared_ptr<Fd> wake_;
  Fd launcher_;  // where `farandole run` says how ranks have ended, if it started them; of mutex_
  std::atomic<bool> hears_launcher_{false};
  TimePoint next_beat_{};
  TimePoint mend_until_ = TimePoint::max();  // when the first broken connection is given up
  ClockLog clock_;

  mutable std::mutex mutex_;  // guards these
  std::map<uint64_t, StreamProgress> streams_;
  std::deque<uint64_t> closed_;  // of those: slower ranks may ask for a while
  std::map<std::pair<uint64_t, int>, StreamAnswer> answers_;
  std::map<uint64_t, std::shared_ptr<FailureRecord>> cells_;
  std::deque<uint64_t> closed_groups_;  // likewise: those whose cells were here
  std::map<uint64_t, ErrorRecord> verdicts_;
  std::map<uint64_t, Report> reports_;  // by group, without an answer

  TimePoint awake_{}, last_turn_{};  // of the thread, as what follows
  std::vector<int> told_lost_;       // ranks that this one hears no more, as it has told the others
  std::vector<int> told_stops_;      // of ranks here, as it has told the other hosts
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: all else is there
};

}  // namespace farandole
