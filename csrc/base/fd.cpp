#include "base/fd.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace farandole {

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void open_more_files() {
  rlimit most{};
  if (::getrlimit(RLIMIT_NOFILE, &most) != 0 || most.rlim_cur == most.rlim_max) return;
  most.rlim_cur = most.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &most);  // where that is refused, running out names the limit
}

Error errno_error(std::string_view call) {
  const int code = errno;
  std::string verdict = std::string(call) + " failed: " + std::strerror(code) + " (errno " +
                        std::to_string(code) + ")";
  rlimit most{};
  if (code != EMFILE || ::getrlimit(RLIMIT_NOFILE, &most) != 0)
    return {ErrorCode::resource, verdict};
  verdict += "; this process may open " + std::to_string(most.rlim_cur);
  return {ErrorCode::resource,
          verdict,
          {},
          "let processes open more files: ulimit -n, or the limit of your container"};
}

void throw_errno(std::string_view call) { throw errno_error(call); }

Fd copy_of(const Fd& fd) {
  return Fd(checked(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0), "fcntl(F_DUPFD_CLOEXEC)"));
}

Fd make_event_fd() { return Fd(checked(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd")); }

void ring(int event_fd) {
  const uint64_t one = 1;
  // A full counter (EAGAIN) is as loud as it gets; nothing else can fail on an owned eventfd.
  [[maybe_unused]] const auto written = ::write(event_fd, &one, sizeof one);
}

void silence(int event_fd) {
  uint64_t count = 0;
  [[maybe_unused]] const auto taken = ::read(event_fd, &count, sizeof count);
}

void watch(int epoll, int fd, uint32_t events, uint64_t tag) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  checked(::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

}  // namespace farandole
