// Polls the streams of one rank. One thread at a time polls (the token is the driver's); any
// thread submits. Nothing here blocks but park().
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "control/host.h"
#include "control/status_page.h"
#include "control/wait_watch.h"
#include "engine/driver.h"
#include "engine/task.h"
#include "stream/stream.h"

namespace farandole {

struct TuningTable;
class TcpDoor;

/// Makes a backend for one stream, whose memory outlives it.
using BackendMaker = std::function<std::unique_ptr<Backend>(const Engine&, const Membership&,
                                                            uint64_t key, const StreamMemory&)>;

/// Makes what connects a rank to the members of a group; `key` is the connection's own.
using ConnectMaker = std::function<Connect(const Engine&, const Membership&, uint64_t key)>;

/// Makes what a rank's connections go over, in order of preference.
using TransportsMaker = std::function<std::vector<std::shared_ptr<Transport>>(const Engine&)>;

struct EngineOptions {
  Duration spin = duration_of(Config{}.spin_us / 1e6);
  Duration warn_after = duration_of(Config{}.warn_after);
  ProgressMode progress = ProgressMode::automatic;
  bool threads = true;  // false: the engine's owner polls it, as simulated worlds do
  std::optional<FewThreads> few_threads;
  TransportsMaker transports;  // none: ranks have no connections
  BackendMaker direct;         // runs over shared memory
  BackendMaker schedules;      // runs what that cannot
  BackendMaker eager;          // of several hosts: runs small operations instead of them
  std::string device_path = Config{}.device_path;  // auto, or a way (devices/device_paths)
  size_t device_bucket_bytes = Config{}.device_bucket_bytes;  // for one piece of a collective
  size_t device_link_blocks = Config{}.device_link_blocks;    // of a fold over links; 0: any
  size_t staged_piece_bytes = Config{}.staged_piece_bytes;    // of an array that goes by the host
  Wire wire = Wire::plain;          // how bytes between hosts are protected
  bool pairs_by_schedules = false;  // direct runs nothing between two ranks either
  ConnectMaker channels;            // none: ranks exchange no messages
  std::shared_ptr<Trace> trace;     // null: nothing is traced until set_trace()
  // Measurements by which backends choose, the same on all ranks. Only backends read them.
  std::shared_ptr<const TuningTable> tuning;
  std::string job;              // what its ranks are found by from outside (control/status_page.h)
  uint32_t first_sequence = 0;  // where the numbers of operations begin, for tests of their wrap
};

struct EngineCounters {
  uint64_t turns = 0;
  size_t arena_bytes = 0;
  size_t arena_allocations = 0;
  size_t streams = 0;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(Host host, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Host& host() const { return host_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const std::vector<std::shared_ptr<Transport>>& transports() const { return transports_; }
  /// Where ranks on other hosts connect to this one; null on one host.
  std::shared_ptr<TcpDoor> door() const;
  /// See MayHaveGone.
  bool may_have_gone(int rank, TimePoint before) const;
  Driver& driver() { return driver_; }
  StatusPage& status() { return status_; }
  /// Null while nothing is traced. What it points to lives as long as the engine.
  Trace* trace() const { return trace_.load(std::memory_order_acquire); }  // partner: set_trace
  /// Any thread: what begins from now on is recorded there; null: nowhere.
  void set_trace(const std::shared_ptr<Trace>& trace);

  /// Opens a stream without waiting for the peers. `number` tells the streams of a group apart and
  /// is the same on every member. Without `schedules` it has `direct` alone, where that runs pairs.
  std::shared_ptr<Stream> open_stream(const Membership& membership, std::string label,
                                      uint64_t number, bool schedules = true);

  /// The detector of a group that this rank has listed under `key`, which is closed there once its
  /// group and streams are gone on this rank. Once they are on every member here, its cell
  /// (`owned`, on the rank that made it) is given back.
  std::shared_ptr<FailureDetector> share_detector(std::unique_ptr<FailureDetector> detector,
                                                  uint64_t key, std::byte* owned,
                                                  const std::vector<int>& members);

  /// Any thread. With `caller_waits` nobody else is woken to drive.
  Handle submit(const std::shared_ptr<Stream>& stream, Operation operation,
                bool caller_waits = false);
  /// The same for a caller that waits: drives at once, for at most `looks` looks, when nobody else
  /// drives and nothing else is in flight. True when the request is finished, and no other thread
  /// has ever held it.
  bool run(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Request>& request,
           int looks);

  // ---- tasks: what is done besides streams ----

  /// Any thread. The engine keeps it to its end, or until it is dropped.
  void add_task(std::shared_ptr<Task> task);
  /// Any thread. It may be polled for one more turn.
  void drop_task(const std::shared_ptr<Task>& task);
  /// By a task, in its poll(): the stream takes the request up in this turn or the next.
  void launch(const std::shared_ptr<Stream>& stream, std::shared_ptr<Request> request);
  /// Any thread: while somebody holds on, the engine is driven though no operation is in flight.
  void hold_on();
  void let_go();
  /// Any thread: from now on the engine is driven, whatever is in flight: a task watches something
  /// of which nothing notifies this rank.
  void keep_driving();
  /// By the thread that polls: somebody may wait for what a task has finished.
  void note_finished() { driver_.note_finished(); }
  /// By the thread that polls: `completion` runs as those of operations do.
  void complete(std::function<void()> completion);
  /// The engine as streams and tasks see it.
  EngineView view() const;
  const EngineOptions& options() const { return options_; }
  bool has_left() const { return left_.load(std::memory_order_relaxed); }

  /// One bounded turn; true if anything moved.
  bool poll(TimePoint until);
  /// Nothing has moved since then: that counts as a wait until something does, or end_idle().
  void note_idle(TimePoint since);
  void end_idle();
  /// Sleeps until a peer, a submission or a death wakes this rank, or `at_most` has passed.
  void park(Duration at_most);
  /// Nothing wakes a parked rank for some of its channels.
  bool has_to_ask() const;
  /// True while any operation is in flight.
  bool busy() const { return in_flight_.load() > 0; }
  /// True while it has to be driven.
  bool needs_driving() const { return busy() || kept_driving_.load(); }
  /// Wakes the thread that is parked, if one is.
  void wake();
  /// The same for every rank of the host.
  void wake_everyone();
  /// Runs the completions of finished operations; after the token is released.
  void run_completions();
  bool has_completions() const { return completions_full_.load(std::memory_order_acquire); }

  /// Tells the peers that this rank takes no further part, except in what it orders for them.
  void begin_leaving();
  /// It takes part in nothing any more, whatever its program does: the others hear why.
  void show_end(std::string_view what, std::string_view place);
  /// Tells the peers that it is gone. Operations in flight fail.
  void leave();
  /// After leave(), without a thread of the driver's: tasks come to their end, though handles or
  /// groups may keep them and the engine.
  void end_tasks();
  /// After leave(): what connections go over is left, too. PeerLost if a rank has died, without a
  /// word of leaving.
  std::optional<Error> leave_transports();
  /// For a forked child: the engine is its parent's.
  void close_descriptors();
  EngineCounters counters() const;
  std::string describe();

 private:
  struct Submission {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Request> request;
  };
  void note_arrival(Request& request);
  void put(const std::shared_ptr<Stream>& stream, std::shared_ptr<Request> request);
  bool run_alone(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Request>& request,
                 int looks);
  void take_submissions();
  void enqueue(const std::shared_ptr<Stream>& stream, std::shared_ptr<Request> request);
  bool is_of_all(const Stream& stream) const;
  void collect(Stream& stream);
  void ring_sleepers();
  Connect agree_over(const Membership& membership, uint64_t key) const;
  void sweep();
  void show_state(RankState state);
  // engine_watch.cpp
  void watch_events();
  void ask_now_and_then(Deadline until);
  void handle_events(int timeout_ms);
  void look_around();
  void look_at_waits(TimePoint when);
  WaitList waits() const;
  void show_idle();
  void note_death(int rank);
  void note_lost_connections(TimePoint when);
  std::optional<Death> known_death(int rank) const;
  Duration patience_with(int rank) const;
  void note_dead(int rank);

  RankPage& my_page() const { return host_.segment->page(host_.rank); }

  Host host_;
  EngineOptions options_;
  std::atomic<Trace*> trace_{nullptr};
  std::mutex traces_mutex_;                     // guards traces_
  std::vector<std::shared_ptr<Trace>> traces_;  // all there ever were: a thread may hold any
  std::shared_ptr<Arena> arena_;
  Fd epoll_;
  std::vector<std::shared_ptr<Transport>> transports_;

  // State of the polling thread.
  std::vector<std::shared_ptr<Stream>> active_;
  std::vector<std::shared_ptr<Task>> tasks_;
  std::vector<bool> dead_;
  std::vector<Death> deaths_;
  struct Unexplained {
    int rank;
    TimePoint since;
  };
  std::vector<Unexplained> unexplained_;  // deaths whose cause is not yet known
  std::atomic<uint64_t> turns_{0};        // written by the polling thread alone
  uint64_t ended_ = 0;                    // operations that came to their end
  uint64_t rung_for_ = 0;                 // reports of this process, up to which others were woken
  WaitWatch waits_;
  TimePoint idle_since_{};  // of the wait that is counted
  WaitKind idle_for_{};

  StatusPage status_;

  // Crossing points.
  std::mutex inbox_mutex_;  // guards inbox_ and the tasks below
  std::vector<Submission> inbox_;
  std::vector<std::shared_ptr<Task>> new_tasks_, old_tasks_;
  std::atomic<bool> inbox_full_{false};
  std::atomic<int> in_flight_{0};
  std::atomic<int> held_{0};  // how much of it is tasks'
  std::atomic<bool> kept_driving_{false};
  std::mutex completions_mutex_;  // guards completions_
  std::vector<std::function<void()>> completions_;
  std::atomic<bool> completions_full_{false};
  std::atomic<bool> left_{false};

  // Shared with the streams: one that closes must not hold the engine, lest the thread that polls
  // becomes the engine's last owner and has to end itself.
  struct Closed {
    std::mutex mutex;               // guards pages
    std::vector<ClosedPage> pages;  // kept until no peer can read them
    std::atomic<size_t> open_streams{0};
  };
  std::shared_ptr<Closed> closed_ = std::make_shared<Closed>();

  Driver driver_;  // last: its thread ends before anything else does
};

}  // namespace farandole
