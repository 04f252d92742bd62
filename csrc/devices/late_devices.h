// Finds the ranks whose devices keep the others waiting when an operation in streams is late.
#pragma once

#include <optional>
#include <string>

#include "devices/device_paths.h"
#include "devices/exchange.h"
#include "stream/stream.h"

namespace farandole {

/// An operation that is not complete in time.
struct LateStep {
  std::string title;
  Duration waited{};
  std::optional<DeviceWay> held_up;  // path of the operation that holds it up; nothing: a graph
};

/// By the thread that polls.
class LateDevices {
 public:
  LateDevices(const EngineView& around, const Membership& membership,
              std::shared_ptr<DeviceExchange> exchange);

  /// The verdict, once the device has given the same answer twice: while things still move, no rank
  /// is to blame. To be called every few milliseconds until then. Throws where the device is lost.
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
