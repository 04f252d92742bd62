// Sets up a multicast object (NVLS) among the ranks of one host. The outcome is the same on all of
// them, in the same words. It takes two meetings (devices/peers.h), since no device may bind memory
// before all take part:
//
//   joining   each offers its device, or why it has no part; the first one the object. All join.
//   binding   each has bound its memory, or not.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/exchange.h"

namespace farandole {

/// Never blocks. By the thread that polls.
class NvlsMeeting {
 public:
  /// The group's devices must share buckets. `key`: no other meeting may use it or the next one.
  /// `wanted`: NVLS was asked for by name, so the log warns where there is none.
  NvlsMeeting(const Host& host, const Membership& membership, uint64_t key,
              std::shared_ptr<DeviceExchange> exchange, bool wanted);

  /// Whether anything has moved.
  bool poll();
  bool done() const { return !meeting_; }
  /// Then: why the group has none, the same on all members; empty: it has one.
  const std::string& refusal() const { return refusal_; }
  /// Then, where it has one: the parting. Others may use this rank's memory until they end theirs.
  std::optional<PeerParting> take_parting() { return std::exchange(parting_, std::nullopt); }
  /// The members whose message is missing.
  std::vector<int> silent() const { return meeting_ ? meeting_->silent() : std::vector<int>(); }

 private:
  PeerOffer offer() const;
  PeerOffer bound() const;
  void refuse_shared_devices(std::span<const PeerOffered> all) const;
  void end(std::string refusal);

  const Host& host_;
  const Membership& membership_;
  uint64_t key_;
  std::shared_ptr<DeviceExchange> exchange_;
  bool wanted_;
  bool binding_ = false;
  std::optional<PeerMeeting> meeting_;
  std::optional<PeerParting> parting_;
  std::string refusal_;
};

}  // namespace farandole
