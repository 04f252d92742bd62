#include "base/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/fd.h"

namespace farandole {
namespace {

constexpr std::array<uint32_t, 64> kRounds{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const std::byte* at) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word = word << 8 | std::to_integer<uint32_t>(at[i]);
  return word;
}

void put_big_endian(uint64_t value, int bytes, std::byte* to) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(value >> (8 * (bytes - 1 - i)));
}

std::array<uint32_t, 64> expanded(const std::byte* block) {
  std::array<uint32_t, 64> w{};
  for (size_t i = 0; i < 16; ++i) w[i] = big_endian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  return w;
}

}  // namespace

void Sha256::take_block(const std::byte* block) {
  const std::array<uint32_t, 64> w = expanded(block);
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t choice = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + choice + kRounds[i] + w[i];
    const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + majority;
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const std::array<uint32_t, 8> worked{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < worked.size(); ++i) state_[i] += worked[i];
}

void Sha256::add(std::span<const std::byte> bytes) {
  bytes_ += bytes.size();
  while (!bytes.empty()) {
    const size_t taken = std::min(bytes.size(), kBlock - pending_bytes_);
    std::memcpy(pending_.data() + pending_bytes_, bytes.data(), taken);
    pending_bytes_ += taken;
    bytes = bytes.subspan(taken);
    if (pending_bytes_ < kBlock) continue;
    take_block(pending_.data());
    pending_bytes_ = 0;
  }
}

Digest Sha256::finish() {
  const uint64_t bits = bytes_ * 8;
  constexpr std::byte kEnd{0x80}, kFill{0};
  add({&kEnd, 1});
  while (pending_bytes_ != kBlock - sizeof bits) add({&kFill, 1});
  std::array<std::byte, sizeof bits> length{};
  put_big_endian(bits, sizeof bits, length.data());
  add(length);
  Digest digest{};
  for (size_t i = 0; i < state_.size(); ++i) put_big_endian(state_[i], 4, digest.data() + 4 * i);
  return digest;
}

HmacSha256::HmacSha256(std::span<const std::byte> key) {
  std::array<std::byte, 64> inner{};
  if (key.size() > inner.size()) {
    Sha256 hash;
    hash.add(key);
    std::ranges::copy(hash.finish(), inner.begin());
  } else {
    std::ranges::copy(key, inner.begin());
  }
  std::array<std::byte, 64> outer = inner;
  for (std::byte& b : inner) b ^= std::byte{0x36};
  for (std::byte& b : outer) b ^= std::byte{0x5c};
  inner_.add(inner);
  outer_.add(outer);
}

Digest HmacSha256::finish() {
  outer_.add(inner_.finish());
  return outer_.finish();
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  std::byte differences{0};
  for (size_t i = 0; i < a.size(); ++i) differences |= a[i] ^ b[i];
  return differences == std::byte{0};
}

void fill_with_random_bytes(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    bytes = bytes.subspan(static_cast<size_t>(checked(got, "getrandom")));
  }
}

}  // namespace farandole
