// A handshake over a socket: never waits.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

#include "base/fd.h"
#include "transport/tcp_handshake.h"

namespace farandole {

/// A connection whose ends have both proved who they are.
struct TcpConnection {
  Fd socket;
  ConnectionKeys keys;
};

class TcpTalk {
 public:
  enum class State : uint8_t { talking, agreed, refused, lost };

  /// `socket` is non-blocking, connected or about to be.
  TcpTalk(Fd socket, TcpHandshake handshake)
      : socket_(std::move(socket)), handshake_(std::move(handshake)) {}

  /// As far as the socket lets us.
  State advance();
  int socket() const { return socket_.get(); }
  const TcpHandshake& handshake() const { return handshake_; }
  /// Why the connection was lost: errno; 0: the other end has closed.
  int error() const { return error_; }
  TcpConnection take_connection() { return {std::move(socket_), handshake_.keys()}; }
  void close() { socket_.reset(); }

 private:
  bool send();
  bool receive();
  bool lose(ssize_t result);

  Fd socket_;
  TcpHandshake handshake_;
  std::array<std::byte, TcpHandshake::kMostRead> in_{};
  size_t have_ = 0;
  bool lost_ = false;
  int error_ = 0;
};

}  // namespace farandole
