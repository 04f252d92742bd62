// Pieces of all ranks' inputs, wherever they lie: where they are mapped, or fetched by address.
#pragma once

#include <vector>

#include "backends/direct_path.h"

namespace farandole {

class Fetch {
 public:
  explicit Fetch(const StreamMemory& memory);

  /// Bytes of a piece of one rank's input. The pieces of all ranks together stay in the L2 cache.
  size_t piece_bytes() const { return piece_bytes_; }
  /// Finds [at, at + bytes) of every input, in bytes, until the next call. False: the operation
  /// goes no further (DirectOperation::read).
  bool fetch(const DirectOperation& what, size_t at, size_t bytes);
  /// By rank.
  const std::vector<const std::byte*>& inputs() const { return inputs_; }

 private:
  const StreamMemory& memory_;
  size_t piece_bytes_;
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte> temporary_;  // kept between calls: fresh pages cost more than the copies
};

}  // namespace farandole
