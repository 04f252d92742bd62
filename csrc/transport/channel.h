// One ordered, reliable byte stream to one peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/copy.h"
#include "base/seal.h"

namespace farandole {

/// The transfers for which the receiver says where bytes shall lie, and those for which the sender
/// asks it. Both ends of a channel have the same rule.
struct PlaceRule {
  size_t shortest = SIZE_MAX;  // bytes
  bool by_visits = false;      // the sender writes into the receiver's memory (StreamMemory)
  bool of_exchanges = false;   // only in steps that send and receive
};

/// Whether memory of a channel's users is still read or written.
enum class Held { no, for_ever, for_now };

/// Used only by the thread that polls the engine. Nothing here blocks; any call may throw
/// Error(link).
class Channel {
 public:
  virtual ~Channel() = default;

  /// Takes a prefix of `bytes` and returns its length; 0 when there is no room now. Bytes taken
  /// must stay unchanged until drained(): a channel may pass a reference instead of a copy.
  virtual size_t write(std::span<const std::byte> bytes) = 0;
  virtual bool drained() = 0;
  /// Whether the channel copies bytes that it takes, so that the caller may change them at once,
  /// unless it refers() to them. Copies may stay in the channel until drained() is called.
  virtual bool copies() const { return false; }
  /// Whether bytes that the channel has taken must not change yet.
  virtual bool refers() { return !copies() && !drained(); }

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

  // ---- whole messages (transport/message_link.h) ----

  /// Whether messages are sealed, as where processes outside the job may be on the way.
  virtual bool is_sealed() const { return false; }
  /// The seals of messages; null: the channel is not connected yet.
  virtual Seals* seals() { return nullptr; }

  // ---- places: bytes go where they shall lie without a copy in between ----

  /// The transfers that are offered a place.
  virtual PlaceRule place_rule() const { return {}; }
  /// Called by the receiver once it has read all earlier bytes: the next `count` bytes shall lie at
  /// `place`; null: nowhere yet, they will be folded. Memory at `place` may change until they have
  /// all been read. The bytes may still arrive like any others.
  virtual void offer([[maybe_unused]] std::byte* place, [[maybe_unused]] size_t count) {}
  /// Called by the sender: memory of the receiver to which the sender copies a prefix of `bytes`.
  /// Empty: write() them. Nothing: not known yet.
  virtual std::optional<std::span<std::byte>> place_for(std::span<const std::byte>) {
    return std::span<std::byte>();
  }
  /// Called by the sender: the next `count` bytes have been copied to their place.
  virtual void delivered([[maybe_unused]] size_t count) {}

  // ---- the end in the middle of something ----

  /// Nothing is written or read any more. Asked until it is not held for now.
  virtual Held let_go() { return Held::no; }
};

}  // namespace farandole
