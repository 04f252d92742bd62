// The machine that kernels are written for. nvcc and NVRTC give CUDA's; any other compiler one that
// a host executor runs (tests/cuda/executor.h), so that tests run the kernels' own source.
//
// Memory that peers write is read by load_peer, and memory that they read is written by store_peer:
// never through the non-coherent cache, which nobody invalidates. Order between ranks comes from
// load_acquire and store_release alone, whose scope is the whole system.
//
// FARANDOLE_DEVICE functions are inlined; FARANDOLE_DEVICE_APART ones are not: what is rare stands
// once in the module instead of at each of a hundred places.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole::cuda {

/// The most that one access moves.
struct alignas(16) Pack {
  uint32_t words[4];
};

/// The type that an access of so many bytes moves.
template <size_t bytes>
struct WordOf {
  using type = Pack;
};
template <>
struct WordOf<8> {
  using type = uint64_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <typename T>
using WordFor = typename WordOf<sizeof(T)>::type;

}  // namespace farandole::cuda

#if defined(__CUDACC__)
#include "cuda/kernels/device_cuda.h"
#else
#include "cuda/kernels/device_host.h"
#endif

namespace farandole::cuda {

/// Whether a word that only grows, modulo 2^32, has come to `epoch`.
FARANDOLE_DEVICE bool reached(uint32_t word, uint32_t epoch) {
  return static_cast<int32_t>(word - epoch) >= 0;
}

/// The abort word lies in host memory, a microsecond away: spins look at it now and then.
FARANDOLE_DEVICE bool wait_for(const uint32_t* word, uint32_t epoch, const uint32_t* abort) {
  for (uint32_t turn = 1;; ++turn) {
    if (reached(load_acquire(word), epoch)) return true;
    if (turn % kTurnsBetweenLooks == 0 && load_acquire(abort) != 0) return false;
    relax(turn);
  }
}

}  // namespace farandole::cuda
