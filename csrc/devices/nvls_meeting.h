// How the ranks of one host come by a multicast object (NVLS). What comes of it is the same on all
// of them, in the same words. Two meetings (devices/peers.h), since no device may bind memory
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
  /// Of a group whose devices share buckets. `key`: this and the next are of no other meeting.
  /// `wanted`: somebody has asked for NVLS by name, and is told where there is none.
  NvlsMeeting(const Host& host, const Membership& membership, uint64_t key,
              std::shared_ptr<DeviceExchange> exchange, bool wanted);

  /// Whether anything has moved.
  bool poll();
  bool done() const { return !meeting_; }
  /// Then: why the group has none, the same on all members; empty: it has one.
  const std::string& refusal() const { return refusal_; }
  /// Then, where it has one: how they part. Others may use this rank's memory until they have told.
  std::optional<PeerParting> take_parting() { return std::exchange(parting_, std::nullopt); }
  /// The members whose word is missing.
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
