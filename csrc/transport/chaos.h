// A transport that behaves as badly as the contract of channel.h allows, from a seed: short writes,
// late delivery, reads in dribs, a cut at a chosen byte. Delays count polls, never time, so a
// failure repeats.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/transport.h"

namespace farandole {

struct ChaosPlan {
  uint64_t seed = 0;
  size_t longest_write = 4096;   // bytes taken at once: 0 to this, at random
  size_t longest_read = 4096;    // bytes shown at once beyond those already seen
  unsigned longest_delay = 3;    // polls that anything may be held back
  uint64_t cut_at = UINT64_MAX;  // each channel throws Error(link) once it has taken so many bytes
};

std::unique_ptr<Transport> chaos_transport(std::unique_ptr<Transport> inner, ChaosPlan plan);

}  // namespace farandole
