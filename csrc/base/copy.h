// Copies of bulk data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace farandole {

#if defined(__SSE2__)

namespace detail {

/// Lines of `to` that lie whole in it, stored by `store`; the rest by memcpy.
template <typename Store>
void copy_lines(std::byte* to, const std::byte* from, size_t bytes, Store store) {
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
    for (size_t i = 0; i < 4; ++i) store(reinterpret_cast<__m128i*>(to + at) + i, part[i]);
  }
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace detail

/// As memcpy. glibc moves more than a few KiB by `rep movsb` where the processor says that it is
/// fast; on AMD's it is slow where the target stands a few bytes further into its page than the
/// source (https://sourceware.org/bugzilla/show_bug.cgi?id=30994). 1 MiB out of another core's
/// caches, Zen 4, 16 bytes further: 41 us, by vectors 29; 8 bytes further: 370 us, by vectors 53.
inline void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t kMoved = 2 << 10;  // glibc's least
  if (bytes < kMoved || !__builtin_cpu_is("amd")) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  detail::copy_lines(to, from, bytes,
                     [](__m128i* place, __m128i part) { _mm_store_si128(place, part); });
}

/// As memcpy, for what is evicted before anybody reads it: lines that will be overwritten whole are
/// not fetched first. The bytes are there for other threads once this rank has published anything.
inline void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
  detail::copy_lines(to, from, bytes,
                     [](__m128i* place, __m128i part) { _mm_stream_si128(place, part); });
  _mm_sfence();  // streamed stores are ordered by nothing else
}

#else

inline void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
inline void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
  copy_bytes(to, from, bytes);
}

#endif

}  // namespace farandole
