// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): who proves that it knows a secret.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace farandole {

using Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  void add(std::span<const std::byte> bytes);
  /// Once, at the end.
  Digest finish();

 private:
  static constexpr size_t kBlock = 64;
  void take_block(const std::byte* block);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlock> pending_{};
  size_t pending_bytes_ = 0;
  uint64_t bytes_ = 0;
};

class HmacSha256 {
 public:
  explicit HmacSha256(std::span<const std::byte> key);
  void add(std::span<const std::byte> bytes) { inner_.add(bytes); }
  /// Once, at the end.
  Digest finish();

 private:
  Sha256 inner_, outer_;
};

/// Takes as long wherever they differ: how far a guess was right is not to be measured.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

/// From the kernel, fit for secrets.
void fill_with_random_bytes(std::span<std::byte> bytes);

}  // namespace farandole
