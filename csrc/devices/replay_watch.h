// Replays of CUDA graphs that have collectives: nobody tells the host of them, so it looks at what
// the devices write, and for what would leave their streams waiting for ever.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/step_watch.h"

namespace farandole {

/// By the thread that polls; its end by any.
class ReplayWatch {
 public:
  /// `timeout`: of a replay; zero: none.
  ReplayWatch(Engine& engine, const Membership& membership,
              std::shared_ptr<DeviceExchange> exchange, Duration timeout);
  /// Waits for what is being replayed, as StepWatch does.
  ~ReplayWatch();
  ReplayWatch(const ReplayWatch&) = delete;
  ReplayWatch& operator=(const ReplayWatch&) = delete;

  /// A collective became part of a graph. Its number, by which devices tell of it.
  uint32_t add(std::string title);

  void poll() { watch_.poll(); }
  void look_around(TimePoint when);
  bool idle() const;

 private:
  std::optional<Error> difference(const CudaGraphState& state) const;
  std::optional<Error> somebody_left(TimePoint when) const;
  void see(const CudaGraphState& state, TimePoint when);
  const std::string& title_of(uint32_t number) const;
  std::string replay_of(uint32_t number) const;

  Engine& engine_;
  EngineView around_;
  Membership membership_;
  std::shared_ptr<DeviceExchange> exchange_;
  Duration timeout_;
  std::vector<std::string> titles_;  // of collectives, by number
  uint32_t seen_ = 0;                // replays that the watch has, or had
  TimePoint seen_at_{};
  StepWatch watch_;
};

}  // namespace farandole
