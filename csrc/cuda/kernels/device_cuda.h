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
/// A barrier that says how many threads said true.
FARANDOLE_DEVICE uint32_t block_votes(bool mine) {
  return static_cast<uint32_t>(__syncthreads_count(mine));
}
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

// Float16 by instructions, which every architecture has: bits are those of device_host.h, since
// widening is exact and narrowing rounds to the nearest, ties to even, also to subnormals and to
// infinity. But for a NaN: it becomes the one that we have, and widened ones keep their payload
// only until they are narrowed.
FARANDOLE_DEVICE float float32_from_float16(uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
  return value;
}
FARANDOLE_DEVICE uint32_t float16_from_float32(float value) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return value == value ? half : 0x7e00;
}

// Rounded once, as the processor's are.
FARANDOLE_DEVICE float square_root(float value) { return __fsqrt_rn(value); }
FARANDOLE_DEVICE double square_root(double value) { return __dsqrt_rn(value); }

FARANDOLE_DEVICE size_t global(const void* address) { return __cvta_generic_to_global(address); }

// Memory of this device that nobody else touches while the kernel runs.
// Packs in words: the compiler would take small elements apart and put them together again.
template <typename T>
FARANDOLE_DEVICE T load(const T* from) {
  __builtin_assume(__isGlobal(from));
  if constexpr (sizeof(T) == sizeof(Pack))
    return bits_as<T>(*reinterpret_cast<const Pack*>(from));
  else
    return *from;
}
template <typename T>
FARANDOLE_DEVICE void store(T* to, const T& value) {
  __builtin_assume(__isGlobal(to));
  if constexpr (sizeof(T) == sizeof(Pack))
    *reinterpret_cast<Pack*>(to) = bits_as<Pack>(value);
  else
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

template <typename T>
FARANDOLE_DEVICE T load_peer(const T* from) {
  WordFor<T> bits;
  load_bits(bits, global(from));
  return bits_as<T>(bits);
}
template <typename T>
FARANDOLE_DEVICE void store_peer(T* to, const T& value) {
  store_bits(global(to), bits_as<WordFor<T>>(value));
}

FARANDOLE_DEVICE uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(global(word)) : "memory");
  return value;
}
FARANDOLE_DEVICE void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(global(word)), "r"(value) : "memory");
}

/// Returns the value before. For memory of this device: on that of others it may not be atomic.
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
