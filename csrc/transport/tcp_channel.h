// A channel over a TCP connection: bytes go from the caller's memory to the kernel and from the
// kernel into place. What is folded passes through a small buffer.
//
// The connection is made when the channel is first used, so that lanes which no plan uses cost
// nothing. It may be broken: where the peer has died or left, that is the engine's to find out and
// to name, so the channel only falls silent; else it is Error(link).
#pragma once

#include <functional>
#include <memory>

#include "base/clock.h"
#include "transport/channel.h"
#include "transport/tcp_door.h"
#include "transport/tcp_wakes.h"

namespace farandole {

/// What the channels of a rank share.
struct TcpShared {
  TcpShared(std::shared_ptr<TcpDoor> its_door, std::function<bool(int)> has_gone_or_none)
      : door(std::move(its_door)), wakes(door->news()), has_gone(std::move(has_gone_or_none)) {}

  std::shared_ptr<TcpDoor> door;
  TcpWakes wakes;
  std::function<bool(int)> has_gone;  // whether a rank has died or left; none: no rank does
};

class TcpChannel : public Channel {
 public:
  TcpChannel(std::shared_ptr<TcpShared> shared, const TcpLane& lane, int peer)
      : shared_(std::move(shared)), lane_(lane), peer_(peer) {}
  ~TcpChannel() override;

  size_t write(std::span<const std::byte> bytes) override;
  bool drained() const override { return true; }  // what was taken the kernel has
  bool copies() const override { return true; }
  std::span<const std::byte> peek(size_t at_least) override;
  void consume(size_t count) override { begin_ += count; }
  size_t read(std::span<std::byte> into) override;

 private:
  static constexpr size_t kBufferBytes = 64 * 1024;
  static constexpr Duration kPatience = std::chrono::seconds(1);  // for a death to be seen

  bool connected();
  size_t receive(std::span<std::byte> into);
  void lose(int error);
  void complain();
  std::span<const std::byte> buffered() const { return {buffer_.get() + begin_, end_ - begin_}; }

  std::shared_ptr<TcpShared> shared_;
  TcpLane lane_;
  int peer_;
  std::shared_ptr<TcpArrival> arrival_;  // while it is not connected
  TcpLink link_;
  bool ended_ = false;  // the peer writes no more
  int error_ = 0;       // why the connection is broken, if it is
  TimePoint broken_since_{};
  std::unique_ptr<std::byte[]> buffer_;
  size_t begin_ = 0, end_ = 0;  // what of it has arrived and is not consumed
};

}  // namespace farandole
