// A rank's words to `farandole run`, which else sees of its ranks only when they end; and its words
// to the ranks: how one of them, on whatever host, has ended.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string_view>

#include "base/fd.h"
#include "control/deaths.h"

namespace farandole {

/// Between the parts of a word, which is any text without it.
inline constexpr char kBetweenParts = '\x1f';

/// Sends who this is (RANK, pid), then `word`; nothing where no launcher listens. Waits for a
/// second at most. Also at the very end of the process.
void tell_launcher(std::string_view word) noexcept;

struct ToldDeath {
  int rank = -1;
  pid_t pid = 0;
  Death death;
};

/// Where this process hears the launcher; none where no launcher is, or it hears it already.
Fd ear_for_launcher();
/// The next word that came from a process of this user, without waiting.
std::optional<ToldDeath> next_told_death(int ear);

}  // namespace farandole
