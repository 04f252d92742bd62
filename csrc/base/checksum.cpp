#include "base/checksum.h"

#include <array>
#include <cstring>

#include "base/hash.h"

namespace farandole {
namespace {

// A step of a hash waits for the one before it; so many that know nothing of each other keep the
// multiplier busy.
constexpr size_t kLanes = 8;
constexpr size_t kStripe = kLanes * sizeof(uint64_t);

void add_stripe(std::array<Hash, kLanes>& lanes, const std::byte* from) {
  std::array<uint64_t, kLanes> words;
  std::memcpy(words.data(), from, kStripe);
  for (size_t i = 0; i < kLanes; ++i) lanes[i].add(words[i]);
}

}  // namespace

uint64_t checksum(std::span<const std::byte> bytes) {
  std::array<Hash, kLanes> lanes;
  const std::byte* at = bytes.data();
  const std::byte* const end = at + bytes.size() / kStripe * kStripe;
  for (; at != end; at += kStripe) add_stripe(lanes, at);
  if (const size_t rest = bytes.size() % kStripe; rest > 0) {
    std::array<std::byte, kStripe> padded{};
    std::memcpy(padded.data(), at, rest);
    add_stripe(lanes, padded.data());
  }
  Hash whole;
  for (const Hash& lane : lanes) whole.add(lane.value());
  whole.add(uint64_t{bytes.size()});  // which tells padding from zeros
  return whole.value();
}

}  // namespace farandole
