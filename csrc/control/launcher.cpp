#include "control/launcher.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/fixed_text.h"

namespace farandole {

namespace {

/// An abstract address: its first byte is 0. The names are python/farandole/_launch/words.py's.
struct Name {
  template <typename... Parts>
  explicit Name(const char* format, Parts... parts) {
    address.sun_family = AF_UNIX;
    const int text =
        std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, format, parts...);
    length =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(text));
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{};
  socklen_t length = 0;
};

/// "death", rank, pid and exit code, or minus the signal.
std::optional<ToldDeath> parsed(const char* text) {
  ToldDeath told;
  int code = 0;
  if (std::sscanf(text, "death\x1f%d\x1f%d\x1f%d", &told.rank, &told.pid, &code) != 3)
    return std::nullopt;
  if (code < 0)
    told.death.signal = -code;
  else
    told.death.exit_code = code;
  return told;
}

bool is_of_this_user(msghdr& head) {
  for (const cmsghdr* extra = CMSG_FIRSTHDR(&head); extra != nullptr;
       extra = CMSG_NXTHDR(&head, const_cast<cmsghdr*>(extra))) {
    if (extra->cmsg_level != SOL_SOCKET || extra->cmsg_type != SCM_CREDENTIALS) continue;
    ucred who{};
    std::memcpy(&who, CMSG_DATA(extra), sizeof who);
    return who.uid == ::geteuid();
  }
  return false;
}

}  // namespace

Fd ear_for_launcher() {
  const char* run = std::getenv("FARANDOLE_RUN_ID");
  if (run == nullptr) return {};
  Fd ear(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  const Name name("farandole-rank-%.64s-%d", run, static_cast<int>(::getpid()));
  if (!ear || ::setsockopt(ear.get(), SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes) != 0 ||
      ::bind(ear.get(), name.get(), name.length) != 0)
    return {};
  return ear;
}

std::optional<ToldDeath> next_told_death(int ear) {
  for (;;) {
    char text[256] = {};
    alignas(cmsghdr) char extra[CMSG_SPACE(sizeof(ucred))] = {};
    iovec part{text, sizeof text - 1};
    msghdr head{};
    head.msg_iov = &part;
    head.msg_iovlen = 1;
    head.msg_control = extra;
    head.msg_controllen = sizeof extra;
    if (::recvmsg(ear, &head, MSG_DONTWAIT) < 0) return std::nullopt;
    if (const auto told = parsed(text); told && is_of_this_user(head)) return told;
  }
}

void tell_launcher(std::string_view word) noexcept {
  const char* run = std::getenv("FARANDOLE_RUN_ID");
  const char* rank = std::getenv("FARANDOLE_WORKER");  // of an elastic job: its ranks change
  if (rank == nullptr) rank = std::getenv("RANK");
  if (run == nullptr || rank == nullptr) return;
  const Name name("farandole-launcher-%.64s", run);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  const timeval most{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
  char text[2048];
  const int head = std::snprintf(text, sizeof text, "%.20s%c%d%c", rank, kBetweenParts,
                                 static_cast<int>(::getpid()), kBetweenParts);
  const std::string_view fitting = cut(word, sizeof text - static_cast<size_t>(head));
  std::memcpy(text + head, fitting.data(), fitting.size());
  // No launcher listens where ranks were started otherwise.
  [[maybe_unused]] const auto sent = ::sendto(fd, text, static_cast<size_t>(head) + fitting.size(),
                                              MSG_NOSIGNAL, name.get(), name.length);
  ::close(fd);
}

}  // namespace farandole
