// The key of the world's group, which is the same on all ranks (Membership::key).
#pragma once

#include <cstdint>

namespace farandole {

inline constexpr uint64_t kWorldKey = 0x5741'4c53'0000'0001;

}  // namespace farandole
