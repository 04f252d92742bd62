#include "control/local_socket.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/hash.h"

namespace farandole {

LocalAddress::LocalAddress(const std::string& job) {
  // A hash keeps long names within the 108 bytes an address has.
  const std::string text = "farandole-" + std::to_string(::getuid()) + "-" +
                           std::to_string(hash_of(job)) + "-" + job.substr(0, 48);
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path + 1, text.data(), text.size());  // leading 0: abstract
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

Fd make_local_socket() {
  return Fd(checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "socket"));
}

bool connect_at_once(int fd, const LocalAddress& address) {
  const int flags = checked(::fcntl(fd, F_GETFL), "fcntl");
  checked(::fcntl(fd, F_SETFL, flags | O_NONBLOCK), "fcntl");
  if (::connect(fd, address.get(), address.length) != 0) return false;
  checked(::fcntl(fd, F_SETFL, flags), "fcntl");
  return true;
}

bool same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

bool send_message(int fd, const void* data, size_t bytes, std::span<const int> fds) {
  iovec body{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(fd, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

bool receive_message(int fd, void* data, size_t bytes, std::vector<Fd>* fds) {
  iovec body{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  auto got = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  // A peer that closed with something unread: what it sent before comes behind this error.
  if (got < 0 && errno == ECONNRESET) got = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return false;
  std::vector<Fd> taken;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(c) + i * sizeof(int), sizeof descriptor);
      taken.emplace_back(descriptor);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    throw_errno("receiving descriptors");
  }
  const bool whole = got == static_cast<ssize_t>(bytes) && (message.msg_flags & MSG_TRUNC) == 0;
  if (whole && fds != nullptr) *fds = std::move(taken);
  return whole;
}

}  // namespace farandole
