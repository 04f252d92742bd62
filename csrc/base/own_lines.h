// Lines of cache that are about to be written.
#pragma once

#include <cstddef>

namespace farandole {

/// Asks for the lines as this core's own, without waiting. Stores leave a core in order, each when
/// its line is there; lines that other cores have read are so fetched side by side. An all-reduce
/// of 1 KiB by lines, Zen 4: 0.99 us without, 0.94 with.
inline void own_lines(std::byte* begin, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < bytes; at += kLine) {
#if defined(__x86_64__)
    // Not __builtin_prefetch, which asks to read unless all is compiled for newer processors.
    asm volatile("prefetchw %0" : : "m"(begin[at]));
#else
    __builtin_prefetch(begin + at, 1);
#endif
  }
}

}  // namespace farandole
