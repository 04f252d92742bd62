// Operations by steps that are in a device's streams and not complete. The host need not wait for
// them; a stream that needs a result does. While there are any, the engine is driven, and looks for
// causes that would block streams for ever: ranks that have died, a lost device, a deadline.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/trace.h"
#include "devices/late_devices.h"
#include "engine/engine.h"

namespace farandole {

/// One operation on its way.
struct StepInFlight {
  std::optional<uint32_t> number;  // nothing: not all of it is in the streams
  std::string title;
  Trace* trace = nullptr;  // where it is shown, if it is
  TraceEvent shown{};      // but for its times
  Deadline deadline;
  Duration timeout{};            // besides, from the first look around; zero: none
  std::optional<DeviceWay> way;  // nothing: in a graph
  StepMoments moments;
  std::shared_ptr<const void> kept;  // what keeps its arrays
  TimePoint seen{};                  // by the first look around; its deadline counts from there
  bool rings = false;                // when it is complete
};

/// By the thread that polls; its end by any.
class StepWatch {
 public:
  StepWatch(Engine& engine, Membership membership, std::shared_ptr<DeviceExchange> exchange);
  /// As end().
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  void add(StepInFlight step);
  /// All of the newest one, which had no number, is in the streams.
  void launched(uint32_t number);
  /// Drops the newest one, whose end cannot be put there: nothing would tell when it has run.
  void drop_newest();

  void poll();
  /// The end of the oldest one will wake this rank.
  void before_park();
  void look_around(TimePoint now);
  /// Waits for what is in flight, as long as its deadline allows and all ranks live.
  void end();
  bool idle() const { return in_flight_.empty(); }

 private:
  size_t drop_complete();
  void trace(const StepInFlight& step);
  void look_for_failure(TimePoint when);
  std::optional<Error> look_for_the_late(TimePoint when);
  Error during(const Error& error) const;
  void look_for_the_dead();
  void drain() noexcept;
  bool somebody_has_died() const;

  Engine& engine_;
  EngineView around_;
  Membership membership_;
  std::shared_ptr<DeviceExchange> exchange_;
  LateDevices late_;
  std::deque<StepInFlight> in_flight_;
  TimePoint next_look_{};
  TimePoint traced_until_{};
};

}  // namespace farandole
