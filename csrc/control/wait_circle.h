// Finds ranks that wait for each other for ever, and words the error, by pure functions. For the
// reasons see Note [Deadlock] in control/wait_watch.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/wait_board.h"

namespace farandole {

/// The waits and threads that one rank has shown lately.
struct RankWaits {
  TimePoint looked, still_since;  // of its engine
  int64_t stands = 0;             // which says whether it has moved: still_since as it knows it
  std::vector<Wait> waits;
  std::vector<std::string> titles;
  bool complete = false;
  TimePoint threads_looked, threads_still_since;
  int64_t threads_stand = 0;
  ThreadReport::State threads = ThreadReport::free;
  std::string place, step;
};

/// By world rank; nothing for ranks that are unknown.
using RanksWaits = std::vector<std::optional<RankWaits>>;

/// The dead ranks that rank `self` waits for, itself among them, ascending; none if it is alive.
/// `ranks`: those that are blocked; `gone`: those that have left.
std::vector<int> circle_of(int self, const RanksWaits& ranks, const std::vector<bool>& gone);

/// "waits in barrier #3 for rank 0"; empty when it waits in nothing that needs somebody.
std::string waits_text(const RankWaits& rank, const RanksWaits& ranks);
/// The same of each rank of a circle, with how far its program has come.
std::string story_of(const std::vector<int>& circle, const RanksWaits& ranks);
Error deadlock_of(const std::vector<int>& circle, const RanksWaits& ranks, TimePoint when);

}  // namespace farandole
