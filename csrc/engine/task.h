// Work besides streams that the thread which polls an engine does.
#pragma once

#include "base/clock.h"
#include "base/error.h"

namespace farandole {

struct WaitList;

/// Called by the thread that polls the engine, and by no other.
class Task {
 public:
  virtual ~Task() = default;
  /// A bounded share of a turn; true if anything moved. Never blocks, never throws.
  virtual bool poll(TimePoint until) = 0;
  /// Nothing has moved, and the thread goes to sleep: what wakes it for this task's sake is asked
  /// for.
  virtual void before_park() {}
  /// Now and then: deaths, deadlines, warnings.
  virtual void look_around(TimePoint now) = 0;
  /// Whether other ranks may wait for what this rank has agreed to, beyond the end of its engine.
  virtual bool is_awaited() const { return false; }
  /// The rank has left, and nothing begins any more: waits for what others need of it, and leaves
  /// nothing waiting for them. Once, and never throws.
  virtual void leave() {}
  /// Appends the operations it has begun that have not come to their end.
  virtual void list_waits(WaitList&) const {}
  /// Fails what it has listed.
  virtual void fail_waits(const Error&) {}
};

}  // namespace farandole
