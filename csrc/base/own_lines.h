// Lines of cache that are about to be written.
#pragma once

#include <cstddef>

namespace farandole {

/// Asks for a line as this core's own, without waiting. Always inlined: code for newer processors
/// (fold/instruction_sets) leaves no copy of it for the linker to choose.
[[gnu::always_inline]] inline void own_line(std::byte* at) {
#if defined(__x86_64__)
  // Not __builtin_prefetch, which asks to read unless all is compiled for newer processors.
  asm volatile("prefetchw %0" : : "m"(*at));
#else
  __builtin_prefetch(at, 1);
#endif
}

/// The same for several. Stores leave a core in order, each when its line is there; lines that
/// other cores have read are so fetched side by side. An all-reduce of 1 KiB by lines, Zen 4:
/// 0.99 us without, 0.94 with.
inline void own_lines(std::byte* begin, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < bytes; at += kLine) own_line(begin + at);
}

}  // namespace farandole
