#include "control/deaths.h"

#include <linux/ioctl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include <cstring>
#include <fstream>
#include <sstream>

namespace farandole {
namespace {

// The kernel's struct pidfd_info in its first published size (64 bytes), declared here because
// the headers of older systems lack it.
struct ProcessInfo {
  uint64_t mask, cgroup;
  uint32_t pid, tgid, ppid, ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
  int32_t exit_code;
};
static_assert(sizeof(ProcessInfo) == 64);
constexpr uint64_t kExitInfo = 1 << 3;
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, ProcessInfo);

Death from_status(int status) {
  Death death;
  if (WIFSIGNALED(status)) death.signal = WTERMSIG(status);
  if (WIFEXITED(status)) death.exit_code = WEXITSTATUS(status);
  return death;
}

/// The last field of a zombie's stat line; readable by the same user.
std::optional<int> zombie_status(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');  // of a process that ends meanwhile: nothing, and no exception
  const size_t end = text.rfind(')');
  if (end == std::string::npos || end + 2 >= text.size() || text[end + 2] != 'Z')
    return std::nullopt;
  std::istringstream fields(text.substr(end + 2));
  std::string field;
  for (int i = 3; i <= 52; ++i)
    if (!(fields >> field)) return std::nullopt;
  return std::atoi(field.c_str());
}

}  // namespace

std::optional<Death> death_of(int process_fd, pid_t pid) {
  ProcessInfo info{};
  info.mask = kExitInfo;
  if (::ioctl(process_fd, kGetInfo, &info) == 0 && (info.mask & kExitInfo) != 0)
    return from_status(info.exit_code);
  if (const auto status = zombie_status(pid)) return from_status(*status);
  return std::nullopt;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? "SIG" + std::string(name) : "signal " + std::to_string(signal);
}

std::string Death::how() const {
  if (signal > 0) return "was killed by " + signal_name(signal);
  if (exit_code >= 0) return "exited with code " + std::to_string(exit_code);
  return "died";
}

}  // namespace farandole
