// Whole messages to one other rank and back, over a channel that is connected meanwhile: each
// behind its length and, where the channel is sealed, in front of its seal (base/seal.h).
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/wire.h"
#include "transport/transport.h"

namespace farandole {

inline constexpr size_t kLargestMessage = 64 << 20;  // of bytes

/// Used by the thread that polls. Any call may throw Error(link).
class MessageLink {
 public:
  explicit MessageLink(std::unique_ptr<Connecting> connecting)
      : connecting_(std::move(connecting)) {}

  /// Takes a message of up to kLargestMessage bytes.
  void send(std::vector<std::byte> message) { send_frame(framed(message)); }
  /// The same with its length in front (base/wire.h). `sealed`: how many bytes of the message the
  /// seal covers; the bytes after them are tensors', which go as they are.
  void send_frame(std::vector<std::byte> frame, size_t sealed = SIZE_MAX);
  /// Moves bytes both ways, but receives at most one message; true if any moved.
  bool poll();
  /// The next message that has come whole; false when there is none.
  bool receive(std::vector<std::byte>& message);
  /// Everything that was to be sent is on its way.
  bool sent() const { return outgoing_.empty(); }

 private:
  bool connect();
  bool write();
  bool read();

  struct Outgoing {
    std::vector<std::byte> bytes;  // with the length in front
    size_t written = 0;
    size_t sealed = 0;
    bool is_ready = false;  // its seal, if any, is behind it
  };
  bool make_ready(Outgoing& message);
  void open(std::vector<std::byte>& message);
  std::unique_ptr<Connecting> connecting_;
  std::unique_ptr<Channel> channel_;
  std::deque<Outgoing> outgoing_;
  uint32_t length_ = 0;  // of the message that is coming
  size_t length_read_ = 0, body_read_ = 0;
  std::vector<std::byte> body_;
  bool is_broken_ = false;  // its seal: the next message may fit the number of one left out
  std::deque<std::vector<std::byte>> arrived_;
};

}  // namespace farandole
