// How far the devices of all ranks have come, while streams wait: what this rank's flags say of
// it, copied to the host in a stream that waits for nobody.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "cuda/driver/memory.h"
#include "cuda/driver/stream.h"
#include "cuda/kernels/parameters.h"
#include "cuda/work.h"

namespace farandole::cuda {

/// Ranks by their bits.
using RankBits = uint64_t;
static_assert(kMostRanks <= 64);

class Arrivals {
 public:
  explicit Arrivals(const std::shared_ptr<const DeviceContext>& context);

  /// Those of steps, and of kernels that spin.
  void ask(const StreamRef& stream, const Flags* steps, const Flags* spins);
  bool asked() const { return asked_; }
  /// Once that stream is idle: the ranks that have not come to a meeting to which others have, or
  /// which is the next for all. None where all have come to all that is under way. `met`, `spun`:
  /// the meetings of this rank's streams, up to those ahead, by strand, and by kernels that spin.
  RankBits late(uint32_t rank, uint32_t size, const std::array<uint32_t, kCudaStrands>& met,
                uint32_t spun);

 private:
  /// How Flags begin: the channels that strands have, the first of which the first block of kernels
  /// that spin has, too.
  struct Copied {
    uint32_t epoch[kMostChannels];
    uint32_t arrived[kCudaStrands][kMostRanks];
  };
  PinnedMemory copied_;  // two of them
  bool asked_ = false;
};

}  // namespace farandole::cuda
