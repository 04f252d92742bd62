// How a process on this host has died.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace farandole {

struct Death {
  int signal = 0;           // the signal that killed it, or 0
  int exit_code = -1;       // how it exited, or -1 when not known
  std::string how() const;  // "was killed by SIGKILL", "exited with code 1", "died"
};

/// How a process whose descriptor has become readable ended. The exit status belongs to the
/// parent; it can be read from /proc while the process is a zombie, and from the descriptor once
/// the parent has taken it (Linux 6.15). Nothing when neither shows it (yet).
std::optional<Death> death_of(int process_fd, pid_t pid);

std::string signal_name(int signal);

}  // namespace farandole
