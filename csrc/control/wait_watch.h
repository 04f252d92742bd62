// Ranks show each other the operations they wait in. Warnings name ranks by these, and circles of
// ranks that wait for each other for ever are found.
//
// Note [Deadlock]
//
// A rank is blocked while none of its threads will do anything unless one of its operations ends
// (ThreadReport, by its watch), and none of its operations ends. It is dead if, moreover, each of
// its operations needs a rank that has not begun it and is dead. The largest set of ranks of which
// this holds is a deadlock: what one of them needs, another would have to begin, and none will
// begin anything. Ranks that are in no call, that compute, sleep, read or are stopped are in no
// such set.
//
// Ranks do not show their state in one moment. So the set is looked for twice, and counts if every
// rank has shown anew, since the first look, that it has not moved from before it: then all of them
// stood still in one moment, the first look's, and each knew then who had not begun. The lowest
// rank of the set says so to the others: they may share no group with it, and once one has gone on
// with the error, nobody would find the set again.
//
// Ranks on other hosts are asked what they show (control/waits_elsewhere.h), over the connection
// which also says what they have begun: what they are known not to have begun, they had not when
// they showed it. Nobody is blocked there before a host that does not answer would be lost.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "control/host.h"
#include "control/wait_circle.h"

namespace farandole {

struct ErrorRecord;

/// The operations that a rank waits in, collected by the thread that polls.
struct WaitList {
  std::vector<Wait> waits;
  std::vector<std::string> titles;  // of the first few that need somebody
  uint64_t begun = 0;               // counts what was begun and ended

  void add(const Wait& wait, const std::string& title);
};

/// Finds deadlocks of one rank; used by the thread that polls.
class WaitWatch {
 public:
  WaitWatch(const Host& host, Duration warn_after);

  /// Whether it is time to look; `ended` counts operations that have come to their end.
  bool due(TimePoint when, uint64_t ended);
  /// Shows what this rank waits in. Returns an error if it is in a circle.
  std::optional<Error> look(TimePoint when, const WaitList& list);

  /// Whether others may still read that this rank waits in something.
  bool shows() const { return shows_; }

  /// ", which waits in barrier #3 for rank 0, at train.py, line 12, in main", after `link`; empty:
  /// not known.
  std::string doing(int world_rank, std::string_view link = ", which ") const;
  /// "; this is a deadlock: rank 0 waits …" when it looks so already.
  std::string suspicion(TimePoint when) const;

 private:
  struct Stand {  // a rank, and what changes when it moves
    int rank;
    int64_t waits, threads;
    bool operator==(const Stand&) const = default;
  };
  std::optional<RankWaits> shown_by(int world_rank) const;
  RanksWaits blocked_ranks(TimePoint when, Duration patience) const;
  std::vector<bool> gone_ranks() const;
  void show(TimePoint when, const WaitList& list);
  void ask(TimePoint when, const WaitList& list);
  std::vector<int> concerned_by(const WaitList& list) const;
  void send_verdict(int world_rank, const Error& error, int64_t stands) const;
  std::optional<Error> confirm(TimePoint when);
  std::optional<Error> take_verdict();

  const Host& host_;
  const Duration patience_;  // longer than what is refused or warned of by time takes (named.md)
  uint64_t ended_ = 0;
  TimePoint next_look_{}, next_ask_{};
  uint64_t shown_hash_ = 0;
  bool shows_ = false;
  TimePoint still_since_{};
  // A circle that was seen once: the time, and the times since which its ranks stand still.
  TimePoint seen_{};
  std::vector<Stand> seen_circle_;
};

/// By a rank's watch: waits until it is asked to look (true) or its world is over (false).
bool await_question(WaitBoard& board, uint32_t& heard);
/// By any rank: asks the watch of this board's rank to look.
void ask_watch(WaitBoard& board);
/// Ends that wait, and all later ones.
void end_questions(WaitBoard& board);
void show_threads(WaitBoard& board, ThreadReport report);
/// Tells a rank of a deadlock that it is in, if it still stands where it stood.
void put_verdict(WaitBoard& board, const ErrorRecord& record, int64_t stands);

}  // namespace farandole
