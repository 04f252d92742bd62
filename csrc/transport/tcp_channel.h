// A channel over a TCP connection: bytes go from the caller's memory to the kernel and from the
// kernel into place. Bytes to be folded pass through a small buffer.
//
// The connection is made when the channel is first used, so that lanes which no plan uses cost
// nothing. If it breaks because the peer has died or left, the channel only falls silent, since the
// engine finds out and names the rank; else it is Error(link).
#pragma once

#include <memory>
#include <optional>

#include "base/clock.h"
#include "transport/channel.h"
#include "transport/tcp_door.h"
#include "transport/tcp_records.h"
#include "transport/tcp_wakes.h"
#include "transport/transport.h"

namespace farandole {

/// State shared by a rank's channels.
struct TcpShared {
  TcpShared(std::shared_ptr<TcpDoor> its_door, MayHaveGone may_have_gone_or_none, Wire its_wire)
      : door(std::move(its_door)),
        wakes(door->news()),
        may_have_gone(std::move(may_have_gone_or_none)),
        wire(its_wire) {}

  std::shared_ptr<TcpDoor> door;
  TcpWakes wakes;
  MayHaveGone may_have_gone;  // none: no rank does
  Wire wire;
};

class TcpChannel : public Channel {
 public:
  TcpChannel(std::shared_ptr<TcpShared> shared, const TcpLane& lane, int peer)
      : shared_(std::move(shared)), lane_(lane), peer_(peer) {}
  ~TcpChannel() override;

  size_t write(std::span<const std::byte> bytes) override;
  bool drained() override;
  bool copies() const override { return true; }
  std::span<const std::byte> peek(size_t at_least) override;
  void consume(size_t count) override { begin_ += count; }
  size_t read(std::span<std::byte> into) override;
  bool is_sealed() const override { return !is_in_records(); }
  Seals* seals() override { return connected() ? &*seals_ : nullptr; }

 private:
  static constexpr size_t kBufferBytes = 64 * 1024;
  static constexpr Duration kPatience = std::chrono::milliseconds(400);  // for a death

  bool connected();
  bool is_in_records() const { return shared_->wire != Wire::plain; }
  size_t send(std::span<const std::byte> bytes);
  size_t receive(std::span<std::byte> into);
  bool flush();
  size_t write_records(std::span<const std::byte> bytes);
  size_t receive_record(std::span<std::byte> into);
  [[noreturn]] void refuse(const std::string& why) const;
  void lose(int error);
  void complain();
  std::span<const std::byte> buffered() const { return {buffer_.get() + begin_, end_ - begin_}; }

  std::shared_ptr<TcpShared> shared_;
  TcpLane lane_;
  int peer_;
  std::shared_ptr<TcpArrival> arrival_;  // while it is not connected
  TcpLink link_;
  std::optional<Seals> seals_;  // of messages, once it is connected; else the records'
  std::optional<TcpRecords> records_;
  bool ended_ = false;                      // the peer writes no more
  int error_ = 0;                           // why the connection is broken, if it is
  TimePoint broken_since_{}, explained_{};  // the latter: when that was last asked for
  std::unique_ptr<std::byte[]> buffer_;
  size_t begin_ = 0, end_ = 0;  // what of it has arrived and is not consumed
};

}  // namespace farandole
