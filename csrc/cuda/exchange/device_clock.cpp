#include "cuda/exchange/device_clock.h"

#include <algorithm>
#include <utility>

namespace farandole::cuda {
namespace {

/// Two clocks drift apart by some microseconds in that time, and the driver's times have 24 bits.
constexpr auto kMarkLasts = std::chrono::seconds(1);
/// The quickest of so many tries counts: an event on a busy device may be late.
constexpr int kMarkTries = 3;

}  // namespace

TimePoint ClockMark::time_of(const DeviceEvent& later) const {
  const std::chrono::duration<double, std::milli> since(later.milliseconds_since(event));
  return at + std::chrono::duration_cast<Duration>(since);
}

std::shared_ptr<const ClockMark> DeviceClock::mark() {
  if (newest_ && now() - newest_->at < kMarkLasts) return newest_;
  if (!idle_) idle_ = std::make_unique<DeviceStream>(context_);
  Duration least = Duration::max();
  for (int i = 0; i < kMarkTries; ++i) {
    auto made = std::make_shared<ClockMark>(context_);
    const TimePoint before = now();
    made->event.record(*idle_);
    made->event.synchronize();
    const Duration took = now() - before;
    made->at = before + took / 2;
    if (took < least) newest_ = std::move(made);
    least = std::min(least, took);
  }
  return newest_;
}

}  // namespace farandole::cuda
