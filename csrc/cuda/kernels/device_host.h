// Included by device.h: the machine as a host executor gives it.
#pragma once

#include <atomic>
#include <cmath>
#include <cstring>

#define FARANDOLE_DEVICE inline
#define FARANDOLE_DEVICE_APART inline
#define FARANDOLE_UNROLL
#define FARANDOLE_LOOP

namespace farandole::cuda {

/// An executor defines these.
namespace host {
struct Indices {
  uint32_t thread, threads, block, blocks;
};
Indices indices();
uint32_t barrier(bool mine);        // until all threads of the block are here; how many said true
void spins();                       // nothing to do before somebody else does something
void interleave();                  // a place where others may come in between
void changed();                     // a flag was written
uint32_t broadcast(uint32_t mine);  // a barrier that hands on what thread 0 has
}  // namespace host

inline constexpr uint32_t kTurnsBetweenLooks = 1;

FARANDOLE_DEVICE uint32_t thread_index() { return host::indices().thread; }
FARANDOLE_DEVICE uint32_t thread_count() { return host::indices().threads; }
FARANDOLE_DEVICE uint32_t block_index() { return host::indices().block; }
FARANDOLE_DEVICE uint32_t block_count() { return host::indices().blocks; }
FARANDOLE_DEVICE void block_barrier() { host::barrier(true); }
FARANDOLE_DEVICE bool block_all(bool mine) { return host::barrier(mine) == thread_count(); }
FARANDOLE_DEVICE uint32_t block_votes(bool mine) { return host::barrier(mine); }
FARANDOLE_DEVICE uint32_t block_broadcast(uint32_t mine) { return host::broadcast(mine); }

FARANDOLE_DEVICE float square_root(float value) { return std::sqrt(value); }
FARANDOLE_DEVICE double square_root(double value) { return std::sqrt(value); }

// Plain accesses: where ranks are not ordered, ThreadSanitizer sees a race.
template <typename T>
FARANDOLE_DEVICE T load(const T* from) {
  return *from;
}
template <typename T>
FARANDOLE_DEVICE void store(T* to, const T& value) {
  *to = value;
}
template <typename T>
FARANDOLE_DEVICE T load_peer(const T* from) {
  host::interleave();
  return *from;
}
template <typename T>
FARANDOLE_DEVICE void store_peer(T* to, const T& value) {
  host::interleave();
  *to = value;
}

FARANDOLE_DEVICE uint32_t load_acquire(const uint32_t* word) {
  host::interleave();
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}
FARANDOLE_DEVICE void store_release(uint32_t* word, uint32_t value) {
  host::interleave();
  std::atomic_ref(*word).store(value, std::memory_order_release);
  host::changed();
}

FARANDOLE_DEVICE uint32_t atomic_add(uint32_t* word, uint32_t by) {
  host::interleave();
  const uint32_t before = std::atomic_ref(*word).fetch_add(by, std::memory_order_acq_rel);
  host::changed();
  return before;
}

FARANDOLE_DEVICE void relax(uint32_t) { host::spins(); }

template <typename To, typename From>
FARANDOLE_DEVICE To bits_as(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof to);
  return to;
}

FARANDOLE_DEVICE float float32_from_float16(uint32_t half) {
  // The exponent moves over as it is; the multiplication corrects its bias, also of subnormals.
  const uint32_t magnitude = (half & 0x7fff) << 13;
  uint32_t value = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112F);
  if (magnitude >= 0x1fU << 23) value |= 0x7f800000;
  return bits_as<float>(value | (half & 0x8000) << 16);
}

FARANDOLE_DEVICE uint32_t float16_from_float32(float value) {
  const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7e00;
  uint32_t half = 0x7c00;
  if (magnitude < 0x38800000)  // adding 0.5 lines it up with the unit of float16's subnormals
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5F) - 0x3f000000;
  else if (magnitude < 0x47800000)
    half = (magnitude - (112U << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  return half | ((bits >> 16) & 0x8000);
}

}  // namespace farandole::cuda
