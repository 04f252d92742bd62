// Proof that a peer knows a job's secret and has sent a message: HMAC-SHA256 (RFC 2104), keys that
// follow from a secret (HKDF, RFC 5869), and seals of messages (AES-256-GMAC, NIST SP 800-38D).
//
// Note [Seals]
//
// A message travels behind its length, in front of its seal, which is of its bytes and of how many
// were sent in that direction before it. Without the key, a message cannot be changed, left out,
// repeated, reordered, cut short or forged without the other end noticing. Each direction of each
// connection has a key of its own, which follows from the secret and random bytes of both ends: no
// number is used twice with one key.
//
// A seal may hide its message, too (AES-256-GCM). Without that it keeps nothing secret.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace farandole {

using Digest = std::array<std::byte, 32>;
using Key = std::array<std::byte, 32>;

/// HMAC-SHA256 of the parts, one behind the other. As all here, throws Error(resource) where there
/// is no libcrypto.
Digest hmac_sha256(std::span<const std::byte> key,
                   std::initializer_list<std::span<const std::byte>> parts);

/// HKDF: a key that follows from `secret`, for one purpose. `salt`: random, or of random parts.
Key derived_key(std::span<const std::byte> secret, std::span<const std::byte> salt,
                std::string_view purpose);

/// Takes as long wherever they differ: how far a guess was right is not to be measured.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

/// From the kernel, fit for secrets.
void fill_with_random_bytes(std::span<std::byte> bytes);

/// How bytes between hosts are protected (FARANDOLE_WIRE). Messages are sealed in any case.
enum class Wire : uint8_t {
  plain,    // tensors go as they are
  checked,  // tensors are sealed, too
  sealed,   // and all is encrypted
};

using Mark = std::array<std::byte, 16>;

struct OpensslContext;

/// The state of either end of a direction: a key, and the number of messages before the next.
class SealContext {
 protected:
  SealContext(const Key& key, bool hides, bool closes);
  /// The next message goes `into` there, hidden or shown; null: nowhere.
  bool pass(std::span<const std::byte> message, std::byte* into, uint32_t part);

  struct Free {
    void operator()(OpensslContext* context) const;
  };
  std::unique_ptr<OpensslContext, Free> context_;

 private:
  void begin(uint32_t part);

  bool hides_, closes_;
  uint64_t count_ = 0;  // of messages before the next one
};

/// The sending end of one direction. One thread at a time.
class Sealer : SealContext {
 public:
  explicit Sealer(const Key& key, bool hides = false) : SealContext(key, hides, true) {}
  /// The seal of the next message. `hidden`: where the message goes, encrypted if so; it may stay
  /// where it is. Null: nowhere, if the seal hides nothing. `part`: a number that is sealed with
  /// it.
  Mark close(std::span<const std::byte> message, std::byte* hidden = nullptr, uint32_t part = 0);
  /// Seals the message that stands in `frame` behind its length, and appends the seal.
  void close(std::vector<std::byte>& frame);
};

/// The receiving end. After a message that does not open, its caller reads no more.
class Opener : SealContext {
 public:
  explicit Opener(const Key& key, bool hides = false) : SealContext(key, hides, false) {}
  /// Whether the next message is as it was sent. `shown`: where it goes, likewise.
  bool opens(std::span<const std::byte> message, std::span<const std::byte, 16> seal,
             std::byte* shown = nullptr, uint32_t part = 0);
  /// The same for a message with its seal behind it; it stays where it is.
  bool opens(std::span<std::byte> message_and_seal);
};

/// Keys of a connection, as one of its ends uses them.
struct ConnectionKeys {
  Key out{}, in{};
};

/// Both directions of a connection, at one of its ends.
struct Seals {
  static constexpr size_t kBytes = sizeof(Mark);
  explicit Seals(const ConnectionKeys& keys, bool hide = false)
      : out(keys.out, hide), in(keys.in, hide) {}
  Sealer out;
  Opener in;
};

}  // namespace farandole
