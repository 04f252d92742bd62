// Receiving from the first rank that sends: a request waits here until some rank has begun a
// send of its tag, and then becomes this rank's end of that transfer.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/task.h"
#include "group/pairs.h"

namespace farandole {

/// The receives of one group. The engine keeps it, until its group drops it.
class AnySource : public Task {
 public:
  AnySource(Engine& engine, Membership group, std::shared_ptr<Pairs> pairs);

  // ---- any thread ----

  /// The source is that rank of the group, once the request has finished well.
  std::shared_ptr<const int> submit(std::shared_ptr<Request> request, int tag);
  /// Nothing is received any more; by the group, which ends.
  void close();

  // ---- the thread that polls ----

  bool poll(TimePoint until) override;
  void look_around(TimePoint when) override;
  void list_waits(WaitList& list) const override;
  void fail_waits(const Error& error) override;

 private:
  struct Pending {
    std::shared_ptr<Request> request;
    std::shared_ptr<int> source;
    int tag;
    TimePoint started{}, next_warning{};
  };
  bool begin(Pending& pending);
  std::shared_ptr<Stream> stream_of(int peer, int tag);
  void ask_elsewhere(int tag);
  std::optional<Error> failure_of(Pending& pending, TimePoint when);
  std::optional<Error> absence(int tag, const std::string& title) const;
  bool has_closed(int peer, int tag) const;
  uint64_t key_of(int peer, int tag) const;
  Error stalled(const Pending& pending, TimePoint when) const;
  std::string title(const Pending& pending) const;
  std::string others() const;  // what they are doing
  void fail(Pending& pending, const Error& error);

  Engine& engine_;
  const Membership group_;
  const std::shared_ptr<Pairs> pairs_;
  mutable std::mutex mutex_;  // guards pending_
  std::deque<Pending> pending_;
  std::atomic<bool> waiting_{false};  // there are some
  int next_ = 0;                      // the rank that was served last comes last
};

}  // namespace farandole
