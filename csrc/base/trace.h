// Where the time of a rank goes, as events in rings, written as one part of a Chrome trace.
//
// Every thread records into a ring of its own: no lock and no allocation once its ring is there,
// and the oldest events make room for the newest. The rings lie in a file (base/trace_store.h), so
// that a rank which is killed leaves them. Code that records holds a `Trace*` which is null
// while nothing is traced; that branch is all it then costs.
//
// A track is a row of the picture: a recording thread, or something that outlives threads, such as
// a stream. Intervals on one track never cross: each lies within another or beside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace farandole {

enum class TraceKind : uint8_t {
  operation,   // in flight in its stream
  phase,       // of the operation in flight
  turn,        // polls that moved something; those that follow each other closely are one event
  wait,        // a caller waits for one operation
  final_wait,  // a caller waits for all gradients of a step
  parked,      // the driving thread sleeps until somebody wakes it
  ready,       // a gradient is copied into its bucket
  step,        // first gradient ready to all reduced
  plan,        // gradients get other buckets
  user,        // whatever the program named
  device,      // an operation in a device's streams, by the device's clock
};

/// 128 bytes, touched once when a thread begins to record.
struct TraceEvent {
  TraceKind kind{};
  uint32_t track = 0;  // 0: the thread that records
  uint32_t sequence = 0;
  uint32_t count = 0;  // polls of a turn; 1 for an operation that failed
  TimePoint begin{}, end{};
  TimePoint launched{};  // operation: when it was submitted; device: when its arrays were ready
  uint64_t bytes = 0;    // operation, ready: of this rank's share
  char label[16] = {};   // the collective, or the phase
  char path[16] = {};    // operation: how it was run
  char name[48] = {};    // cut to fit
};
static_assert(sizeof(TraceEvent) == 128);

class TraceStore;

class Trace {
 public:
  static constexpr size_t kEventsPerThread = 32768;  // 4 MiB
  static constexpr size_t kMostThreads = 32;         // the events of further ones are lost

  struct Identity {
    std::string directory;
    uint64_t run = 0;  // the same on all ranks of this run and in no other
    int rank = 0;
    int size = 1;
    std::string host;
    std::string tuning{};  // fingerprint of the table that choices follow from
  };

  /// Makes the directory, readable by this user alone; throws Error(resource).
  explicit Trace(Identity identity);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  const Identity& identity() const { return identity_; }
  const TraceStore& store() const { return *store_; }

  /// The process has left its world and joins another one, whose keys may be the same again.
  void next_world();
  /// Any thread, not often: the number of the track with this name and key (the same on all ranks;
  /// 0: none), made when it is new.
  uint32_t track(const std::string& name, uint64_t key);

  /// Any thread.
  void record(const TraceEvent& event);
  /// Any thread: a poll that moved something.
  void turn(TimePoint begin, TimePoint end);
  /// The calling thread begins an interval: no turn that follows belongs to those before.
  void separate();

  /// Writes all that was recorded to `rank-N.jsonl`, one Chrome trace event a line; the file is
  /// there as a whole or not at all. Events of other threads meanwhile are lost. Throws
  /// Error(resource).
  void write();
  /// Nothing is recorded any more, and the memory of events is given back, the file's descriptor
  /// too. Threads that still hold the pointer may go on calling.
  void close();
  /// The process ends, and has written its part: the file of the rings is not needed.
  void drop_file();

 private:
  struct Ring;
  Ring* my_ring();
  Ring* open_ring();
  void refuse();
  void wait_until_outside() const;

  const Identity identity_;
  const uint64_t id_;                 // no other Trace of this process has it, not even a later one
  std::atomic<bool> writing_{false};  // seq_cst; partner: Ring::enter. True for ever once closed
  bool closed_ = false;               // guarded by mutex_
  std::atomic<bool> written_{false};  // the part, at least once
  mutable std::mutex mutex_;          // guards what follows
  uint64_t worlds_ = 0;               // that were left
  std::vector<std::unique_ptr<Ring>> rings_;
  const std::unique_ptr<TraceStore> store_;
};

/// An interval of the calling thread, recorded when it ends. Does nothing without a trace.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, TraceKind kind, std::string_view name, uint64_t bytes = 0)
      : trace_(trace) {
    if (trace_ != nullptr) [[unlikely]]
      begin(kind, name, bytes);
  }
  ~TraceSpan() {
    if (trace_ != nullptr) [[unlikely]]
      end();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  void begin(TraceKind kind, std::string_view name, uint64_t bytes);
  void end() noexcept;

  Trace* const trace_;
  TraceKind kind_;
  TimePoint begin_;
  uint64_t bytes_;
  char name_[sizeof(TraceEvent::name)];
};

/// The training steps of one reducer; a step may begin on one thread and end on another. Its owner
/// serialises the calls.
class TraceSteps {
 public:
  TraceSteps() = default;
  TraceSteps(const std::string& label, uint64_t key) : name_("steps of " + label), key_(key) {}

  /// The step is open from now on, unless it already is or nothing is traced (null).
  void open(Trace* trace) {
    if (trace != nullptr && since_ == TimePoint{}) [[unlikely]]
      begin(trace);
  }
  /// Records the open step, if there is one.
  void close();

 private:
  void begin(Trace* trace);

  std::string name_;
  uint64_t key_ = 0;
  Trace* trace_ = nullptr;  // in which the open step began
  uint32_t track_ = 0;      // of this trace
  uint32_t number_ = 0;
  TimePoint since_{};
};

}  // namespace farandole
