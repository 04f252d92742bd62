// A hash of words and texts, the same in every process of a world; for telling apart, not for keys.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace farandole {

/// Multiplies and folds, word by word.
class Hash {
 public:
  void add(uint64_t word) { value_ = (std::rotl(value_, 23) ^ word) * 0xff51afd7ed558ccd; }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  void add(std::string_view text) {
    add(text.size());
    for (; !text.empty(); text.remove_prefix(std::min(text.size(), sizeof(uint64_t)))) {
      uint64_t word = 0;
      std::memcpy(&word, text.data(), std::min(text.size(), sizeof word));
      add(word);
    }
  }
  void add(std::span<const size_t> counts) {
    add(counts.size());
    for (const size_t n : counts) add(n);
  }
  uint64_t value() const { return value_ ^ value_ >> 32; }

 private:
  uint64_t value_ = 0x9e3779b97f4a7c15;
};

inline uint64_t hash_of(std::span<const size_t> counts) {
  Hash hash;
  hash.add(counts);
  return hash.value();
}
inline uint64_t hash_of(std::string_view text) {
  Hash hash;
  hash.add(text);
  return hash.value();
}

}  // namespace farandole
