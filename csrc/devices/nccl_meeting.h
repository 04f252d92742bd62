// How a group's ranks come by a communicator of NCCL's: all say whether they have NCCL, the first
// one's id is everybody's, and when all are through, or one is not, all know.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/exchange.h"

namespace farandole {

/// By the thread that polls.
class NcclMeeting {
 public:
  /// `exchange` is null where this rank has none. `wanted`: somebody has asked for NCCL by name,
  /// and is told where there is none.
  NcclMeeting(const Host& host, const Membership& membership, uint64_t key,
              std::shared_ptr<DeviceExchange> exchange, bool wanted);

  /// Whether it is over.
  bool poll();
  bool done() const { return !meeting_; }
  /// Then: why the group has no communicator, the same on all members; empty: it has one.
  const std::string& refusal() const { return refusal_; }
  /// The members whose word is missing.
  std::vector<int> silent() const;

 private:
  bool open(std::span<const PeerOffered> all);

  Membership membership_;
  std::shared_ptr<DeviceExchange> exchange_;
  std::optional<PeerMeeting> meeting_;  // until it is over
  bool wanted_, opened_ = false;
  Deadline until_;
  std::string refusal_;
};

}  // namespace farandole
