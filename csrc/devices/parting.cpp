#include "devices/parting.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace farandole {
namespace {

/// Whether the peer has closed its end. Leftover messages of the meeting are discarded.
bool has_ended(const Fd& socket) {
  char letter[1024];
  for (;;) {
    const ssize_t bytes = ::recv(socket.get(), letter, sizeof letter, MSG_DONTWAIT);
    if (bytes == 0) return true;
    if (bytes < 0 && errno != EINTR) return errno != EAGAIN;
  }
}

}  // namespace

PeerParting::PeerParting(std::vector<Fd> to, std::vector<From> from)
    : to_(std::move(to)), from_(std::move(from)), others_(from_.size()) {}

/// Shuts the sockets down: closing is not enough while a forked child has them open.
void PeerParting::tell() {
  for (const Fd& socket : to_) ::shutdown(socket.get(), SHUT_RDWR);
  to_.clear();
  told_ = true;
}

void PeerParting::listen(const IsDead& is_dead) {
  std::erase_if(from_, [&](const From& other) {
    return has_ended(other.socket) || (other.member >= 0 && is_dead(other.member));
  });
}

bool PeerParting::has_begun(const IsDead& is_dead) {
  listen(is_dead);
  return from_.size() < others_;
}

bool PeerParting::is_over(const IsDead& is_dead) {
  listen(is_dead);
  return from_.empty();
}

}  // namespace farandole
