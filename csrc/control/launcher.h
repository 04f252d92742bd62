// A rank's words to `farandole run`, which else sees of its ranks only when they end.
#pragma once

#include <string_view>

namespace farandole {

/// Between the parts of a word, which is any text without it.
inline constexpr char kBetweenParts = '\x1f';

/// Sends who this is (RANK, pid), then `word`; nothing where no launcher listens. Waits for a
/// second at most. Also at the very end of the process.
void tell_launcher(std::string_view word) noexcept;

}  // namespace farandole
