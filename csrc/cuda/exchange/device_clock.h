// The times at which a device's streams reached events, by the host's clock: for traces.
#pragma once

#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "cuda/driver/event.h"
#include "cuda/driver/stream.h"

namespace farandole::cuda {

/// A moment that both clocks know.
struct ClockMark {
  explicit ClockMark(const std::shared_ptr<const DeviceContext>& context)
      : event(context, Timing::on) {}
  DeviceEvent event;
  TimePoint at;

  /// The host's time of a later event, which is timed and complete.
  TimePoint time_of(const DeviceEvent& later) const;
};

/// By one thread at a time.
class DeviceClock {
 public:
  explicit DeviceClock(std::shared_ptr<const DeviceContext> context)
      : context_(std::move(context)) {}

  /// A mark of the last second. A new one waits for an idle stream of the device: microseconds.
  std::shared_ptr<const ClockMark> mark();

 private:
  std::shared_ptr<const DeviceContext> context_;
  std::unique_ptr<DeviceStream> idle_;  // made when it is first needed
  std::shared_ptr<const ClockMark> newest_;
};

}  // namespace farandole::cuda
