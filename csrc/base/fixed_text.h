// Text in arrays of fixed size, for shared memory and for records that never allocate.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace farandole {

/// As much of `text` as fits beside the zero that ends it, whole characters of UTF-8 only.
inline std::string_view cut(std::string_view text, size_t capacity) {
  size_t n = std::min(text.size(), capacity - 1);
  const auto continues = [&](size_t i) { return (static_cast<uint8_t>(text[i]) & 0xc0) == 0x80; };
  if (n < text.size())
    while (n > 0 && continues(n)) --n;
  return text.substr(0, n);
}

/// Copies as much as fits, and ends it with zero.
inline void copy_cut(std::string_view text, char* into, size_t capacity) {
  const std::string_view fitting = cut(text, capacity);
  std::memcpy(into, fitting.data(), fitting.size());
  into[fitting.size()] = 0;
}

template <size_t N>
void copy_cut(std::string_view text, char (&into)[N]) {
  copy_cut(text, into, N);
}

/// The text that copy_cut() stored, perhaps in another process: its end is not taken on trust.
template <size_t N>
std::string text_in(const char (&from)[N]) {
  return {from, ::strnlen(from, N)};
}

}  // namespace farandole
