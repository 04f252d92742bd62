// Collectives that become part of a CUDA graph: the steps go into the stream that is being
// captured, instead of the devices' own. Ranks agree once, when they capture; replays are among the
// devices alone.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/peers.h"
#include "devices/replay_watch.h"
#include "devices/step_pieces.h"
#include "stream/backend.h"

namespace farandole {

/// The `algorithm` of an operation whose stream is being captured. Not for callers.
inline constexpr std::string_view kGraphWay = "graph";

/// Serves one group, with a bucket of its own that lasts as long as the graphs. By the thread that
/// polls.
class GraphBackend : public Backend {
 public:
  /// `exchange` is null where this rank has no streams there; `bucket` says why it has none.
  GraphBackend(Engine& engine, const Membership& membership, uint64_t key,
               std::shared_ptr<DeviceExchange> exchange, PeerOffer bucket, size_t piece_bytes,
               Duration timeout);

  /// Before the operation starts: its arrays, which only this rank knows.
  void take(StepArrays& arrays) { arrays_ = &arrays; }
  void poll_replays() { watch_.poll(); }
  void look_around(TimePoint when) { watch_.look_around(when); }
  /// Task::leave, of its owner.
  void leave();
  /// Whether graphs use its bucket, now or later.
  bool has_graphs() const { return watch_.has_graphs(); }

  std::string_view name() const override { return "graphs"; }
  bool can_run(const Operation&) const override { return true; }
  void refuse(const Operation&) const override {}
  std::string ways_for(const Operation&) const override { return std::string(kGraphWay); }
  void start(const Operation& operation, uint32_t sequence) override;
  Progress poll(TimePoint until) override;
  std::string declined() const override { return no_buckets_; }
  std::vector<int> lacking() const override;
  void abort() noexcept override { operation_ = nullptr; }
  std::string_view way() const override { return kGraphWay; }

 private:
  void capture();

  const Host& host_;
  Membership membership_;
  std::shared_ptr<DeviceExchange> exchange_;
  size_t piece_bytes_;
  std::optional<PeerMeeting> meeting_;  // until all have met
  std::string no_buckets_;              // why none; the same on all ranks
  ReplayWatch watch_;
  bool left_ = false;

  // The operation in flight.
  const Operation* operation_ = nullptr;
  uint32_t sequence_ = 0;
  StepArrays* arrays_ = nullptr;
};

}  // namespace farandole
