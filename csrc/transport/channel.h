// One ordered, reliable byte stream to one peer.
#pragma once

#include <cstddef>
#include <span>

#include "base/copy.h"

namespace farandole {

/// Used only by the thread that polls the engine. Nothing here blocks; any call may throw
/// Error(link).
class Channel {
 public:
  virtual ~Channel() = default;

  /// Takes a prefix of `bytes` and returns its length; 0 when there is no room now. Bytes taken
  /// must stay unchanged until drained(): a channel may pass a reference instead of a copy.
  virtual size_t write(std::span<const std::byte> bytes) = 0;
  virtual bool drained() const = 0;

  /// Arrived bytes, not copied; empty unless at least `at_least` contiguous bytes are there.
  /// Valid until consume().
  virtual std::span<const std::byte> peek(size_t at_least) = 0;
  virtual void consume(size_t count) = 0;

  /// Moves arrived bytes to their place and returns how many.
  virtual size_t read(std::span<std::byte> into) {
    const std::span<const std::byte> arrived = peek(1);
    const size_t count = arrived.size() < into.size() ? arrived.size() : into.size();
    if (count == 0) return 0;
    copy_bytes(into.data(), arrived.data(), count);
    consume(count);
    return count;
  }
};

}  // namespace farandole
