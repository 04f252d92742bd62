// Owned descriptors and checked system calls: errno and the call's name reach the message.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

namespace farandole {

/// A file descriptor that is closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

class Error;
/// Error(resource) naming `call` and errno.
Error errno_error(std::string_view call);
/// As many as this process may at most.
void open_more_files();
[[noreturn]] void throw_errno(std::string_view call);

/// `result` of a system call; throws when it is -1.
template <typename T>
T checked(T result, std::string_view call) {
  if (result == T(-1)) throw_errno(call);
  return result;
}

Fd copy_of(const Fd& fd);    // the same file; close-on-exec
Fd make_event_fd();          // non-blocking, close-on-exec
void ring(int event_fd);     // adds one; never blocks
void silence(int event_fd);  // takes whatever was added

/// Adds a descriptor to those of an epoll, which reports it as `tag`.
void watch(int epoll, int fd, uint32_t events, uint64_t tag);

}  // namespace farandole
