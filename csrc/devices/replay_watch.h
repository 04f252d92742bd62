// Watches replays of CUDA graphs that have collectives. The host is not notified of them, so it
// reads what the devices write, and looks for failures that would block their streams for ever.
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
  /// `timeout`: of a replay, from when it is seen; zero: none.
  ReplayWatch(Engine& engine, const Membership& membership,
              std::shared_ptr<DeviceExchange> exchange, Duration timeout);
  /// As end().
  ~ReplayWatch();
  ReplayWatch(const ReplayWatch&) = delete;
  ReplayWatch& operator=(const ReplayWatch&) = delete;

  /// A collective became part of a graph. Returns the number by which devices report it.
  uint32_t add(std::string title);

  /// Whether any did.
  bool has_graphs() const { return !titles_.empty(); }

  void poll();
  void look_around(TimePoint when);
  /// Waits for collectives that have begun, while all ranks are there; those that begin later wait
  /// for nobody.
  void end();

 private:
  void wait_at_the_end();
  void report_absentee_at_the_end();
  bool idle() const;
  void report(const Error& error);
  std::optional<Error> difference(const CudaGraphState& state) const;
  std::optional<Error> absentee() const;
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
  TimePoint seen_at_{}, next_drain_{};
  bool reported_ = false, ended_ = false;
  StepWatch watch_;
};

}  // namespace farandole
