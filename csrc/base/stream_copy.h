// A copy that goes past the caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace farandole {

/// As memcpy, for what is evicted before anybody reads it: lines that will be overwritten whole are
/// not fetched first. The bytes are there for other threads once this rank has published anything.
inline void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    __m128i part[4];
    for (size_t i = 0; i < 4; ++i)
      part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + i);
    for (size_t i = 0; i < 4; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, part[i]);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // streamed stores are ordered by nothing else
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace farandole
