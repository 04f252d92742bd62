#include "fusion/joined_rank_proxy.h"

#include <algorithm>
#include <mutex>

namespace farandole {
namespace {

constexpr Duration kLongestGrace = std::chrono::seconds(10);  // with warnings turned off, too

}  // namespace

/// Watches, on the polling thread, for news that the waiting thread needs. It owns no reducer: the
/// last owner of one waits for its end.
class JoinedRankProxy::Watch : public Task {
 public:
  Watch(Group& world, const JoinedRankProxy& owner, std::vector<std::shared_ptr<Stream>> others)
      : engine_(*world.engine()),
        detector_(world.membership().detector),
        rank_(world.rank()),
        grace_(std::min(engine_.options().warn_after, kLongestGrace)),
        owner_(&owner),
        asked_(owner.reducers_.size()) {
    others.push_back(world.program_order());
    for (std::shared_ptr<Stream>& stream : others) others_.push_back({std::move(stream), {}});
  }

  const std::atomic<bool>& news() const { return news_; }

  bool poll(TimePoint) override {
    const std::lock_guard lock(mutex_);
    if (owner_ == nullptr || news_.load(std::memory_order_relaxed)) return false;
    bool news = owner_->joined_.load(std::memory_order_acquire);
    for (size_t i = 0; i < asked_.size(); ++i) {
      const Reducer& reducer = *owner_->reducers_[i];
      const bool open = reducer.step_open();
      asked_[i] = !open && !reducer.stream()->ahead().empty();
      news |= open ? reducer.step_over() : asked_[i];
    }
    if (!news) return false;
    news_.store(true, std::memory_order_release);  // partner: Driver::wait
    engine_.note_finished();
    return true;
  }

  void look_around(TimePoint when) override {
    const std::lock_guard lock(mutex_);
    if (owner_ == nullptr || detector_->failed()) return;
    for (Other& other : others_) {
      const std::vector<int> waiting = other.stream->ahead();
      if (waiting.empty()) {
        other.since = TimePoint{};
      } else if (other.since == TimePoint{}) {
        other.since = when;
      } else if (when - other.since >= grace_) {
        refuse(*other.stream, waiting);
        return;
      }
    }
  }

  /// By the thread that waits: which reducers' steps others have begun, and from here on anew.
  std::vector<bool> take_asked() {
    const std::lock_guard lock(mutex_);
    std::vector<bool> taken(asked_.size());
    taken.swap(asked_);
    news_.store(false, std::memory_order_relaxed);
    return taken;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    owner_ = nullptr;
    others_.clear();
  }

 private:
  struct Other {
    std::shared_ptr<Stream> stream;
    TimePoint since;  // somebody waits
  };

  void refuse(const Stream& stream, const std::vector<int>& waiting) {
    const std::string me = "rank " + std::to_string(rank_);
    Context where;
    where.rank = rank_;
    where.operation = stream.label().empty() ? "program order" : stream.label();
    where.values = {{"waiting", waiting}, {"joined", {rank_}}};
    where.evidence = name_ranks(waiting) + (waiting.size() > 1 ? " have" : " has") +
                     " begun an operation in " + where.operation + " and " +
                     (waiting.size() > 1 ? "wait" : "waits") + " for " + me +
                     ", which is in join()";
    detector_->report(Error(
        ErrorCode::deadlock,
        me + " has joined and cannot take part in what rank " + describe_ranks(waiting) +
            " began: join() stands in for operations by name and for gradients of a "
            "DistributedOptimizer, not for op=Adasum, sharded_update=True, making an optimizer or "
            "a process set, or farandole's own collectives",
        std::move(where),
        "give every rank the same number of steps, or drop the last uneven batch"));
  }

  Engine& engine_;
  const std::shared_ptr<FailureDetector> detector_;
  const int rank_;
  const Duration grace_;  // for another thread of this rank, which may be about to come
  std::mutex mutex_;      // guards what follows
  const JoinedRankProxy* owner_;
  std::vector<bool> asked_;
  std::vector<Other> others_;
  std::atomic<bool> news_{false};
};

JoinedRankProxy::JoinedRankProxy(Group& world, const std::atomic<bool>& joined,
                                 std::vector<std::shared_ptr<Reducer>> reducers,
                                 std::vector<std::shared_ptr<Stream>> others)
    : engine_(*world.engine()),
      joined_(joined),
      reducers_(std::move(reducers)),
      steps_(reducers_.size()),
      watch_(std::make_shared<Watch>(world, *this, std::move(others))) {
  engine_.add_task(watch_);
}

JoinedRankProxy::~JoinedRankProxy() {
  watch_->end();
  engine_.drop_task(watch_);
}

bool JoinedRankProxy::wait(Deadline until) {
  for (;;) {
    if (!answer(until)) return false;
    if (joined_.load(std::memory_order_acquire)) break;
    if (!engine_.driver().wait(watch_->news(), "join", until)) return false;
  }
  for (const auto& reducer : reducers_)
    if (!reducer->drain(until)) return false;
  return true;
}

/// Ends the steps that are over, and begins those that others have begun. Waits for none of them: a
/// peer may be in the steps of two reducers at once.
bool JoinedRankProxy::answer(Deadline until) {
  bool ended = false;
  for (const auto& reducer : reducers_) {
    if (!reducer->step_over()) continue;
    if (!reducer->drain(until)) return false;
    ended = true;
  }
  const std::vector<bool> asked = watch_->take_asked();
  if (ended) return true;  // that may have been seen before the step was open; it is looked at anew
  for (size_t i = 0; i < reducers_.size(); ++i) {
    if (!asked[i] || reducers_[i]->step_open()) continue;
    reducers_[i]->step_by_proxy();
    ++steps_[i];
  }
  return true;
}

}  // namespace farandole
