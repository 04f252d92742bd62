// A way to make channels. A new transport is a new implementation and a row in transports.cpp.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "transport/channel.h"

namespace farandole {

struct PeerInfo {
  int rank = -1;  // in the world
  std::string host;
  pid_t pid = 0;
  std::vector<std::byte> address;
};

/// A connection on its way: polled until its channels (one per lane) are there.
class Connecting {
 public:
  virtual ~Connecting() = default;
  virtual std::vector<std::unique_ptr<Channel>> poll(TimePoint now) = 0;  // empty: not yet
};

/// Begins the connection to a rank of a group, with that many channels. Both sides call it.
using Connect = std::function<std::unique_ptr<Connecting>(int peer, int lanes)>;

/// By the thread that polls: whether a rank of the world has died or left, or had by then, and news
/// of that may be on the way.
using MayHaveGone = std::function<bool(int rank, TimePoint before)>;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual std::vector<std::byte> address() const { return {}; }  // published to the peers
  virtual bool reaches(const PeerInfo& peer) const = 0;
  /// Begins a connection for one stream (`stream_key` is the same on both sides, and unique in the
  /// world). Never blocks; both sides call it.
  virtual std::unique_ptr<Connecting> connect(const PeerInfo& peer, uint64_t stream_key,
                                              int lanes) = 0;

  // ---- parking: by the thread that polls ----

  /// The descriptors that wake a parked engine besides its doorbell.
  virtual std::span<const int> wake_fds() const { return {}; }
  /// From now on those are readable once a channel that has come short could move.
  virtual void before_park() {}
  /// One of them was readable.
  virtual void woken() {}
  /// Whether some channels cannot wake a parked engine, which then looks at them now and then.
  virtual bool has_to_be_asked() const { return false; }

  // ---- the end ----

  /// `rank` of the world has died.
  virtual void lose([[maybe_unused]] int rank) {}
  /// This rank leaves its world; nothing more is moved.
  virtual void leave() {}

  /// In a forked child; the parent's threads may have been in the middle of anything.
  virtual void close_descriptors() {}
};

}  // namespace farandole
