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

void tell_launcher(std::string_view word) noexcept {
  const char* run = std::getenv("FARANDOLE_RUN_ID");
  const char* rank = std::getenv("RANK");
  if (run == nullptr || rank == nullptr) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Abstract: the leading 0 stays. The name is python/farandole/_launch/words.py's.
  const int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1,
                                   "farandole-launcher-%.64s", run);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  const timeval most{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
  char text[2048];
  const int head = std::snprintf(text, sizeof text, "%.20s%c%d%c", rank, kBetweenParts,
                                 static_cast<int>(::getpid()), kBetweenParts);
  const std::string_view fitting = cut(word, sizeof text - static_cast<size_t>(head));
  std::memcpy(text + head, fitting.data(), fitting.size());
  // Nobody listens where ranks were started otherwise.
  [[maybe_unused]] const auto sent = ::sendto(
      fd, text, static_cast<size_t>(head) + fitting.size(), MSG_NOSIGNAL,
      reinterpret_cast<const sockaddr*>(&address),
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length)));
  ::close(fd);
}

}  // namespace farandole
