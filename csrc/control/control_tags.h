// What an event of the control thread's epoll is of; below kProcess the connection of that rank.
#pragma once

#include <cstdint>

namespace farandole {

inline constexpr uint64_t kProcess = uint64_t{1} << 32;  // and the rank
inline constexpr uint64_t kKnock = uint64_t{1} << 33;    // likewise
inline constexpr uint64_t kLauncher = ~uint64_t{1};
inline constexpr uint64_t kWake = ~uint64_t{0};

}  // namespace farandole
