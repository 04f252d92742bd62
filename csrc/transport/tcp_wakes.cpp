#include "transport/tcp_wakes.h"

#include <sys/epoll.h>

namespace farandole {

TcpWakes::TcpWakes(int always) : epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {
  farandole::watch(epoll_.get(), always, EPOLLIN, 0);
}

void TcpWakes::watch() {
  const std::lock_guard lock(mutex_);
  for (TcpLink* link : links_)
    if (link->wants != link->watched) tell(*link);
}

/// Removes a connection that waits for nothing, since epoll always reports one that has closed.
void TcpWakes::tell(TcpLink& link) {
  const int what = link.wants == 0     ? EPOLL_CTL_DEL
                   : link.watched == 0 ? EPOLL_CTL_ADD
                                       : EPOLL_CTL_MOD;
  epoll_event event{};
  event.events = link.wants;
  checked(::epoll_ctl(epoll_.get(), what, link.socket.get(), &event), "epoll_ctl");
  link.watched = link.wants;
}

void TcpWakes::add(TcpLink& link) {
  const std::lock_guard lock(mutex_);
  links_.push_back(&link);
}

/// The kernel forgets what it watches with the last descriptor only, and a child may have another.
void TcpWakes::remove(TcpLink& link) {
  const std::lock_guard lock(mutex_);
  std::erase(links_, &link);
  if (link.watched != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  link.socket.reset();
}

void TcpWakes::close_descriptors() {
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock)
    for (TcpLink* link : links_) link->socket.reset();
  epoll_.reset();
}

}  // namespace farandole
