// The line between two ranks: control messages, in order, each taken once, over a TCP connection
// that may be lost and made anew. It knows no epoll and no clock; its mesh does.
//
// Note [A line outlives its connection]
//
// A router may reset a connection though both ranks live. So each end keeps what it has sent until
// the other says that it has taken it: beats carry how many messages have come. A connection begins
// with the same number, and what the other lacks is sent again. Beats and the
// time are of the moment: they are neither kept nor counted.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/wire.h"
#include "control/control_messages.h"
#include "transport/tcp_talk.h"

namespace farandole {

class ControlLine {
 public:
  // ---- one thread at a time, as all but receive() and next() ----

  /// Over a connection that is new; the first message says how many have come so far.
  void open(TcpConnection connection, bool hides);
  /// Messages that were not taken are kept for the next connection. `abort`: the other end hears of
  /// it at once.
  void close(bool abort = false);
  /// In a forked child.
  void close_descriptor() { socket_.reset(); }
  bool is_open() const { return static_cast<bool>(socket_); }
  int socket() const { return socket_.get(); }

  void send(FrameWriter frame);
  /// For another end of which nothing is read any more: it says no more what it has taken, or that
  /// it has begun. What is sent from now on goes all the same.
  void keep_no_more() { kept_.clear(), keeps_ = false, resumed_ = true; }
  /// As far as the kernel takes it. False: the connection is broken.
  bool flush();
  bool has_unsent() const { return !outgoing_.empty() || (!resumed_ && !kept_.empty()); }
  /// errno of what broke the connection in flush(), or 0.
  int error() const { return error_; }

  /// The other end has taken so many messages. Throws Malformed where that cannot be.
  void acknowledge(uint64_t taken);
  /// The same, as the first message on a connection: the rest is sent again.
  void resume(uint64_t taken);

  // ---- the thread that reads ----

  /// How many messages have come, of those that count.
  uint64_t taken() const { return taken_; }
  /// Once: how many bytes came; 0 at the end of the connection; else -1, with errno.
  ssize_t receive();
  /// The next message that is here whole, until the next call. Throws Malformed.
  std::optional<std::span<const std::byte>> next();
  /// Discards the bytes that are here.
  void forget() { coming_.clear(), at_ = 0; }

 private:
  static constexpr size_t kLargest = 1 << 20;  // of one message, in bytes

  static bool counts(std::byte tag);
  void put(std::vector<std::byte> frame);

  Fd socket_;
  std::optional<Seals> seals_;  // `in` is the reading thread's
  bool resumed_ = false;        // the other end has said what it has
  bool keeps_ = true;
  std::deque<std::vector<std::byte>> outgoing_;
  size_t sent_ = 0;  // of the first of them
  std::deque<std::vector<std::byte>> kept_;
  uint64_t numbered_ = 0;  // how many were sent, those that are kept among them
  int error_ = 0;
  std::vector<std::byte> coming_;  // of the reading thread, as what follows
  size_t at_ = 0;                  // what of it was handed out
  uint64_t taken_ = 0;
};

}  // namespace farandole
