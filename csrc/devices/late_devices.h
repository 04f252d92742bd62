// Whose devices keep the others waiting, where an operation in streams is not complete in time.
#pragma once

#include <optional>
#include <string>

#include "devices/device_paths.h"
#include "devices/exchange.h"
#include "stream/stream.h"

namespace farandole {

/// What is known of an operation that is late.
struct LateStep {
  std::string title;
  Duration waited{};
  std::optional<DeviceWay> held_up;  // the way of what holds it up; nothing: a graph
};

/// By the thread that polls.
class LateDevices {
 public:
  LateDevices(const EngineView& around, const Membership& membership,
              std::shared_ptr<DeviceExchange> exchange);

  /// The verdict, as soon as the device has said twice the same: what moves still is no rank's
  /// fault. To be called again until then, every few milliseconds. Throws where the device is lost.
  std::optional<Error> look(const LateStep& step, TimePoint when);
  /// Nothing is late any more.
  void forget() { asked_ = {}; }

 private:
  Error blame(const LateStep& step, uint64_t places) const;
  Error blame_nobody(const LateStep& step, const std::string& why) const;

  EngineView around_;
  Membership membership_;
  std::shared_ptr<DeviceExchange> exchange_;
  TimePoint asked_{};             // first
  std::optional<uint64_t> seen_;  // last
};

}  // namespace farandole
