// Time as the engine sees it: monotonic, in nanoseconds, always a parameter of polled code.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace farandole {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

inline TimePoint now() { return Clock::now(); }
/// Whether the end of a turn has come. TimePoint::min() always has, without a look at the clock.
inline bool has_come(TimePoint when) { return when == TimePoint::min() || now() >= when; }

/// Below zero: none. More than a century: for ever, for a clock counts nanoseconds in 64 bits.
inline Duration duration_of(double seconds) {
  if (seconds > 3.2e9) return Duration::max();
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::max(seconds, 0.0)));
}

/// A point in time after which a wait gives up; the default never comes.
struct Deadline {
  TimePoint at = TimePoint::max();

  static Deadline never() { return {}; }
  static Deadline after(Duration delay) {
    return delay == Duration::max() ? never() : Deadline{now() + delay};
  }
  static Deadline after_seconds(double seconds) { return after(duration_of(seconds)); }
  bool passed(TimePoint when) const { return when >= at; }
  Duration left(TimePoint when) const { return at <= when ? Duration::zero() : at - when; }
};

inline int64_t nanoseconds_now() { return now().time_since_epoch().count(); }
inline double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace farandole
