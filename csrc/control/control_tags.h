// Tags of events in the control thread's epoll. Below kProcess it is a rank, for its connection.
#pragma once

#include <cstdint>

namespace farandole {

inline constexpr uint64_t kProcess = uint64_t{1} << 32;  // and the rank
inline constexpr uint64_t kKnock = uint64_t{1} << 33;    // likewise
inline constexpr uint64_t kLauncher = ~uint64_t{1};
inline constexpr uint64_t kWake = ~uint64_t{0};

}  // namespace farandole
