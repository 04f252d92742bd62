// Messages from a rank to `farandole run`, which else sees only the ends of its ranks; and messages
// from it to the ranks: how one of them, on any host, has ended.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string_view>

#include "base/fd.h"
#include "control/deaths.h"

namespace farandole {

/// Separates the parts of a message, which are texts without it.
inline constexpr char kBetweenParts = '\x1f';

/// Sends this process's RANK and pid, then `word`; nothing where no launcher listens. Waits for a
/// second at most. Works at the very end of the process, too.
void tell_launcher(std::string_view word) noexcept;

struct ToldDeath {
  int rank = -1;
  pid_t pid = 0;
  Death death;
};

/// A socket for the launcher's messages; none if there is no launcher, or a socket is open already.
Fd ear_for_launcher();
/// The next message that came from a process of this user, without waiting.
std::optional<ToldDeath> next_told_death(int ear);

}  // namespace farandole
