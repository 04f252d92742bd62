// Sockets within one host: abstract UNIX addresses, whole messages, descriptors sent along.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <span>
#include <string>
#include <vector>

#include "base/fd.h"

namespace farandole {

inline constexpr size_t kMostDescriptors = 253;  // what the kernel takes in one message

/// An abstract address, which no file system keeps; the user's number is part of it.
struct LocalAddress {
  explicit LocalAddress(const std::string& job);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }

  sockaddr_un name{};
  socklen_t length = 0;
};

Fd make_local_socket();

/// False, with errno, if no process listens there, or its queue is full for now (EAGAIN).
bool connect_at_once(int fd, const LocalAddress& address);

/// Whether the other end was opened by this process's user.
bool same_user(int fd);

/// One message with at most kMostDescriptors descriptors; false when the peer is gone.
bool send_message(int fd, const void* data, size_t bytes, std::span<const int> fds = {});

/// One message of exactly `bytes`, with its descriptors; false when the peer is gone or sent
/// something else. Throws Error(resource) where this process cannot take the descriptors.
bool receive_message(int fd, void* data, size_t bytes, std::vector<Fd>* fds = nullptr);

}  // namespace farandole
