// One agreed order of operations among the members of a group. Operations run one at a time, in
// the order in which they were submitted; streams of one engine do not wait for each other.
//
//   resting ─► opening ─► agreeing ─► running ─► resting
//                            └► describing ─► comparing ─► resting      (the ranks disagree)
//   running ─► opening ─► …                  (it goes by the host instead, or its next piece does)
//   any phase ─► leaving ─► resting                                     (the group has failed)
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/trace.h"
#include "control/absence.h"
#include "control/failure_detector.h"
#include "stream/agreement.h"
#include "stream/backend.h"
#include "stream/pieces.h"
#include "stream/request.h"
#include "stream/stream_page.h"

namespace farandole {

/// The facts of its group that a stream needs.
struct Membership {
  uint64_t key = 0;          // the group's, the same on all members
  int rank = 0;              // this rank's place in `members`
  std::vector<int> members;  // world ranks
  std::shared_ptr<FailureDetector> detector;
  const std::atomic<uint64_t>* abort = nullptr;
  std::string group{};  // "group of ranks 0-3", also for a pair of its members
};

class WaitWatch;
struct WaitList;

/// The parts of its engine that a stream uses.
struct EngineView : Presence {
  std::shared_ptr<Arena> arena;
  Duration warn_after{};
  const std::atomic<Trace*>* trace = nullptr;  // to null while nothing is traced
  const WaitWatch* waits = nullptr;
};

/// Numbers of a group's streams that are not the program's, which count from 0 (those of pairs:
/// group/pairs.cpp). Channels of a stream go by its number, too, so messages have one of their own.
inline constexpr uint64_t kNamesNumber = uint64_t{1} << 62;  // operations by name
inline constexpr uint64_t kNegotiationNumber = kNamesNumber + 1;
inline constexpr uint64_t kJaxNumber = kNamesNumber + 2;
inline constexpr uint64_t kAgreementNumber = kNamesNumber + 3;  // within a stream: its agreement
inline constexpr uint64_t kFateNumber = kNamesNumber + 4;       // no stream: StreamMemory::fate

/// The key under which the members of a group find each other's pages of stream `number`.
uint64_t stream_key(uint64_t group_key, uint64_t number);

/// How many operations that fold have begun in this process, in any group: a program without any
/// reduces no gradient.
inline std::atomic<uint64_t> reductions_begun{0};

class Stream {
 public:
  /// `agree_over`: how its members agree where they do not all map one segment; else none.
  Stream(const EngineView& around, const Membership& membership, std::string label, uint64_t key,
         uint32_t first_sequence, Connect agree_over = {});
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const Membership& membership() const { return membership_; }
  const std::string& label() const { return label_; }
  const StreamMemory& memory() const { return memory_; }
  uint64_t key() const { return key_; }
  /// Called before the first operation. The backend runs operations that earlier ones cannot run.
  void add_backend(std::unique_ptr<Backend> backend) { backends_.push_back(std::move(backend)); }
  /// The page to be released later, of a stream that is about to be destroyed.
  std::optional<ClosedPage> leave_behind() const { return agreement_->leave_behind(); }

  /// Any thread. Throws Error(invalid_argument) when no backend can run this, saying why.
  void require_backend(const Operation& operation) const;

  // ---- by the thread that polls ----
  void enqueue(std::shared_ptr<Request> request) { queue_.push_back(std::move(request)); }
  bool busy() const { return phase_ != Phase::resting || !queue_.empty(); }
  /// World ranks that have begun an operation which was not submitted here.
  std::vector<int> ahead();
  Progress poll(TimePoint until);
  /// Now and then: deaths, deadlines, warnings.
  void look_around(TimePoint now);
  /// Appends the operation in flight.
  void list_waits(WaitList& list) const;
  /// Requests that have finished since they were last cleared away.
  std::vector<std::shared_ptr<Request>>& finished() { return finished_; }
  /// This rank's own input has not come.
  bool awaits_own_input() const { return shut_; }
  /// Some member has not begun the operation in flight.
  bool awaits_ranks() const;
  /// The state of this stream, for people.
  std::string describe() const;
  /// How the last operation was run; any thread may ask.
  std::string_view last_way() const { return last_way_.load(std::memory_order_relaxed); }

 private:
  enum class Phase { resting, opening, agreeing, running, describing, comparing, leaving };
  static constexpr int kLooksBetweenPosts = 16;  // each takes a line that a peer is about to write

  bool drop_refused();
  void give_back();
  void begin();
  void take_number();
  void enter(Phase next);
  Trace* trace() const { return around_.trace->load(std::memory_order_acquire); }
  void trace_phase(Trace* trace, Phase next);
  void trace_operation(TimePoint end) const;
  std::string track_name() const;
  Progress advance(TimePoint until);
  Progress guarded_advance(TimePoint until);
  bool look_at_gate();
  bool held_back();
  void start();
  bool sees_difference();
  Progress agree();
  Progress run(TimePoint until);
  Progress describe_mine();
  bool compares_on();
  Progress compare_all();
  void fail_group(const Error& error);
  Progress leave();
  bool others_are_out();
  Progress go_by_host(const std::string& why, size_t piece);
  Progress next_piece();
  void finish(std::optional<Error> error);
  Backend& backend_for(const Operation& operation);

  const Operation& operation() const { return queue_.front()->operation; }
  /// The operation that runs now: operation(), or a piece of it.
  const Operation& running() const { return pieces_ ? pieces_->piece() : operation(); }
  std::vector<int> waiting_for() const;  // group ranks that have not submitted it
  std::vector<int> lacking() const;      // those that have, and whose data this rank waits for
  std::vector<int> culprits() const;     // those whose data the waiting ranks lack
  bool needs(int r) const;               // this operation cannot end without group rank r
  std::string title() const;             // "all_reduce #41 'bucket 3'"
  std::string who(int r) const;          // "rank 2 (pid 4711, stopped), which …"
  void check_members(int r);
  void check_closings(TimePoint when);
  bool has_begun(int r) const;
  bool has_completed(int r) const;
  bool waits_for_a_stopped_one(TimePoint now);
  std::vector<int> needed() const;
  void warn(TimePoint now);
  Error stalled(TimePoint now) const;
  Error stalled_here(TimePoint now) const;

  EngineView around_;
  Membership membership_;
  std::string label_;
  uint64_t key_;
  StreamMemory memory_;
  std::unique_ptr<StreamAgreement> agreement_;
  std::vector<std::unique_ptr<Backend>> backends_;  // preferred ones first
  Backend* backend_ = nullptr;                      // the one that runs the operation in flight
  Phase phase_ = Phase::resting;
  uint32_t sequence_ = 0;
  std::atomic<const char*> last_way_{""};  // a literal
  Trace* traced_ = nullptr;                // where the present operation is recorded
  uint32_t track_ = 0;                     // of `traced_`
  TimePoint begun_{}, phase_begun_{};      // set while tracing
  TimePoint started_{}, next_warning_{}, next_stop_look_{}, next_closing_look_{};
  TimePoint leaving_since_{}, held_since_{};
  bool shut_ = false;             // this rank's own input has not come
  bool mixed_ = false;            // the ranks disagree on nothing but whether arrays lie on devices
  size_t piece_ = 0;              // then: of what they go by the host in; 0: as a whole
  std::optional<Pieces> pieces_;  // of the operation in flight, where it runs in pieces
  std::string_view way_of_pieces_;  // the first one's
  int idle_looks_ = 0;              // at data that carry the agreement, since posts were compared
  std::deque<std::shared_ptr<Request>> queue_;  // the front one is in flight
  std::vector<std::shared_ptr<Request>> finished_;
};

}  // namespace farandole
