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
  /// Now and then: deaths, deadlines, warnings.
  virtual void look_around(TimePoint now) = 0;
  /// Appends the operations it has begun that have not come to their end.
  virtual void list_waits(WaitList&) const {}
  /// Fails what it has listed.
  virtual void fail_waits(const Error&) {}
};

}  // namespace farandole
