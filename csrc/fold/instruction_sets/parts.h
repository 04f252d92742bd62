// The last, incomplete pack, where the instruction set has no masks.
#pragma once

#include "fold/instruction_sets/vectors.h"

namespace farandole {
namespace {

/// The last, incomplete pack of `bytes`, which are at least one: what lies behind it in memory is
/// neither read nor written, and counts as zero. By powers of two: a call of memcpy costs as much
/// as folding a kilobyte.
template <typename Pack>
void copy_part(std::byte* to, const std::byte* from, size_t bytes) {
#pragma GCC unroll 8
  for (size_t piece = sizeof(Pack) / 2; piece > 0; piece /= 2) {
    if ((bytes & piece) == 0) continue;
    __builtin_memcpy(to, from, piece);
    to += piece;
    from += piece;
  }
}

template <typename Pack>
Pack load_part(const std::byte* from, size_t bytes) {
  Pack pack{};
  copy_part<Pack>(reinterpret_cast<std::byte*>(&pack), from, bytes);
  return pack;
}

template <typename Pack>
void store_part(std::byte* to, const Pack& pack, size_t bytes) {
  copy_part<Pack>(to, reinterpret_cast<const std::byte*>(&pack), bytes);
}

}  // namespace
}  // namespace farandole
