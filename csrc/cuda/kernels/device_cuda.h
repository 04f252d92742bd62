// Included by device.h: the machine as CUDA gives it.
#pragma once

#define FARANDOLE_DEVICE __device__ __forceinline__
#define FARANDOLE_DEVICE_APART __device__ __noinline__
#define FARANDOLE_UNROLL _Pragma("unroll")
#define FARANDOLE_LOOP _Pragma("unroll 1")

namespace farandole::cuda {

inline constexpr uint32_t kTurnsBetweenLooks = 64;
inline constexpr uint32_t kTurnsAwake = 256;  // of a spin, before it lets other warps go first
inline constexpr uint32_t kNapNanoseconds = 100;

FARANDOLE_DEVICE uint32_t thread_index() { return threadIdx.x; }
FARANDOLE_DEVICE uint32_t thread_count() { return blockDim.x; }
FARANDOLE_DEVICE uint32_t block_index() { return blockIdx.x; }
FARANDOLE_DEVICE uint32_t block_count() { return gridDim.x; }
FARANDOLE_DEVICE void block_barrier() { __syncthreads(); }
/// A barrier that says whether all threads said true.
FARANDOLE_DEVICE bool block_all(bool mine) { return __syncthreads_and(mine) != 0; }
/// A barrier that hands every thread what thread 0 has. Apart: one word of shared memory for all.
FARANDOLE_DEVICE_APART uint32_t block_broadcast(uint32_t mine) {
  __shared__ uint32_t word;
  __syncthreads();
  if (threadIdx.x == 0) word = mine;
  __syncthreads();
  return word;
}

template <typename To, typename From>
FARANDOLE_DEVICE To bits_as(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

// Rounded once, as the processor's are.
FARANDOLE_DEVICE float square_root(float value) { return __fsqrt_rn(value); }
FARANDOLE_DEVICE double square_root(double value) { return __dsqrt_rn(value); }

FARANDOLE_DEVICE size_t global(const void* address) { return __cvta_generic_to_global(address); }

// Memory of this device that nobody else touches while the kernel runs.
template <typename T>
FARANDOLE_DEVICE T load(const T* from) {
  return *from;
}
template <typename T>
FARANDOLE_DEVICE void store(T* to, const T& value) {
  *to = value;
}

// Memory that peers write or read. Volatile, so that they stay behind the meeting before them; the
// loads of one unit still leave together, since nothing waits for a register before it is used.
// Each size in words of its own, then any type of that size.
FARANDOLE_DEVICE void load_bits(Pack& bits, size_t from) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.words[0]), "=r"(bits.words[1]), "=r"(bits.words[2]), "=r"(bits.words[3])
               : "l"(from)
               : "memory");
}
FARANDOLE_DEVICE void load_bits(uint64_t& bits, size_t from) {
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
}
FARANDOLE_DEVICE void load_bits(uint32_t& bits, size_t from) {
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
}
FARANDOLE_DEVICE void load_bits(uint16_t& bits, size_t from) {
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
}
FARANDOLE_DEVICE void load_bits(uint8_t& bits, size_t from) {
  uint32_t wide;
  asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(wide) : "l"(from) : "memory");
  bits = static_cast<uint8_t>(wide);
}
FARANDOLE_DEVICE void store_bits(size_t to, const Pack& bits) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.words[0]),
               "r"(bits.words[1]), "r"(bits.words[2]), "r"(bits.words[3])
               : "memory");
}
FARANDOLE_DEVICE void store_bits(size_t to, uint64_t bits) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
FARANDOLE_DEVICE void store_bits(size_t to, uint32_t bits) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
FARANDOLE_DEVICE void store_bits(size_t to, uint16_t bits) {
  asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
}
FARANDOLE_DEVICE void store_bits(size_t to, uint8_t bits) {
  asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(to), "r"(uint32_t{bits}) : "memory");
}

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
FARANDOLE_DEVICE T load_peer(const T* from) {
  typename WordOf<sizeof(T)>::type bits;
  load_bits(bits, global(from));
  return bits_as<T>(bits);
}
template <typename T>
FARANDOLE_DEVICE void store_peer(T* to, const T& value) {
  store_bits(global(to), bits_as<typename WordOf<sizeof(T)>::type>(value));
}

FARANDOLE_DEVICE uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(global(word)) : "memory");
  return value;
}
FARANDOLE_DEVICE void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(global(word)), "r"(value) : "memory");
}

/// What was there. Of memory of this device: others may not have it atomically.
FARANDOLE_DEVICE uint32_t atomic_add(uint32_t* word, uint32_t by) {
  uint32_t before;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global(word)), "r"(by)
               : "memory");
  return before;
}

FARANDOLE_DEVICE void relax(uint32_t turn) {
  if (turn > kTurnsAwake) __nanosleep(kNapNanoseconds);
}

}  // namespace farandole::cuda
