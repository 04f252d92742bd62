// By how much the clock of this rank's host is ahead of the clock of rank 0's. This aligns the
// traces of several hosts.
//
// Four times of a round trip are known: when it was sent and when it was back, by our clock, and
// when it arrived and was answered, by rank 0's. If both ways took equally long, our clock is ahead
// by the mean of (sent - arrived) and (back - answered). However long each of them took, this is
// wrong by half of both ways together at most. So the quickest of a few round trips says most.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "base/fd.h"

namespace farandole {

/// In nanoseconds.
struct RoundTrip {
  int64_t sent = 0, arrived = 0, answered = 0, back = 0;
  int64_t both_ways() const { return back - sent - (answered - arrived); }
};

/// In nanoseconds: at this time by our clock, which is ahead by so much, give or take `within`.
struct ClockReading {
  int64_t at = 0, ahead = 0, within = 0;
};
ClockReading reading_of(const RoundTrip& trip);

/// Any thread.
class ClockLog {
 public:
  static constexpr int kRoundTrips = 8;  // make a reading: the quickest of them

  void add(const RoundTrip& trip);
  /// The first reading has not been made yet.
  bool is_new() const;
  std::optional<ClockReading> last() const;

  /// From now on readings go to the end of this file, a line `[at,ahead,within]` each, behind
  /// `title` where it is new; the last one there is goes first. Empty: to none. Throws
  /// Error(resource).
  void follow(const std::string& path, const std::string& title);
  /// In a forked child.
  void close();

 private:
  void write(const ClockReading& reading) const;

  mutable std::mutex mutex_;  // guards all
  std::optional<RoundTrip> quickest_;
  int round_trips_ = 0;
  std::optional<ClockReading> last_;
  Fd file_;
};

}  // namespace farandole
