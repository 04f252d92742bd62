// One ordered, reliable byte stream to one peer.
#pragma once

#include <cstddef>
#include <optional>
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
  /// Whether bytes that it takes are copied, so that theirs may change at once. They may stay with
  /// it while nobody asks drained().
  virtual bool copies() const { return false; }

  /// Arrived bytes, not copied; empty unless at least `at_least` contiguous bytes are there.
  /// Valid until consume().
  virtual std::span<const std::byte> peek(size_t at_least) = 0;
  virtual void consume(size_t count) = 0;

  /// Moves arrived bytes to their place and returns how many.
  virtual size_t read(std::span<std::byte> into) {
    const std::span<const std::byte> arrived = peek(1);
    const size_t count = arrived.size() < into.size() ? arrived.size() : into.size();
    if (count == 0) return 0;
    if (into.data() != arrived.data()) copy_bytes(into.data(), arrived.data(), count);
    consume(count);
    return count;
  }

  // ---- put: a sender that maps the memory where its bytes shall lie writes them there itself ----

  /// By the receiver: the next `count` bytes shall lie at `place`; null: they are not to be put.
  /// The sender may write there until all of them have been read; they may arrive as others do.
  virtual void offer([[maybe_unused]] std::byte* place, [[maybe_unused]] size_t count) {}
  /// By the sender: where the receiver takes a prefix of `bytes`. Empty: write() them. Nothing: it
  /// has not said so yet.
  virtual std::optional<std::span<std::byte>> place_for(std::span<const std::byte>) {
    return std::span<std::byte>();
  }
  /// By the sender: the next `count` bytes stand in their place.
  virtual void delivered([[maybe_unused]] size_t count) {}
};

}  // namespace farandole
