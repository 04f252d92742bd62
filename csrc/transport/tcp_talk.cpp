#include "transport/tcp_talk.h"

#include <sys/socket.h>

#include <cerrno>
#include <span>

namespace farandole {

TcpTalk::State TcpTalk::advance() {
  for (;;) {
    const bool sent = send();
    if (lost_) return State::lost;
    if (!sent) return State::talking;
    if (handshake_.refusal() && handshake_.to_read() == 0) return State::refused;
    if (handshake_.agreed()) return State::agreed;
    const bool received = receive();
    if (lost_) return State::lost;
    if (!received) return State::talking;
  }
}

/// True when nothing is left to be sent.
bool TcpTalk::send() {
  while (!handshake_.to_send().empty()) {
    const auto bytes = handshake_.to_send();
    const ssize_t count = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return lose(count);
    handshake_.sent(static_cast<size_t>(count));
  }
  return true;
}

/// Not a byte more than the handshake has: what follows is the channel's. True when it has moved.
bool TcpTalk::receive() {
  const size_t want = handshake_.to_read();
  while (have_ < want) {
    const ssize_t count = ::recv(socket_.get(), in_.data() + have_, want - have_, 0);
    if (count <= 0) return lose(count);
    have_ += static_cast<size_t>(count);
  }
  handshake_.take(std::span(in_).first(want));
  have_ = 0;
  return true;
}

bool TcpTalk::lose(ssize_t result) {
  if (result < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  lost_ = true;
  error_ = result < 0 ? errno : 0;
  return false;
}

}  // namespace farandole
