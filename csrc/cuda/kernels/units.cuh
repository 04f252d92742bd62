// Units: what a thread moves at a time. Sixteen bytes where arrays allow it, one element at their
// heads and tails.
#pragma once

#include "cuda/kernels/arithmetic.cuh"

namespace farandole::cuda {

/// `n` elements. Of sixteen bytes or more in 16-byte accesses, so aligned to that.
template <typename E, uint32_t n>
struct alignas(n * sizeof(BitsOfElement<E>) < 16 ? sizeof(BitsOfElement<E>) : 16) Unit {
  static constexpr uint32_t kElements = n;
  BitsOfElement<E> bits[n];
};

template <typename E>
using One = Unit<E, 1>;
template <typename E>
inline constexpr uint32_t kPerPack = 16 / sizeof(BitsOfElement<E>);
template <typename E>
using Packed = Unit<E, kPerPack<E>>;

template <typename E, uint32_t n>
FARANDOLE_DEVICE Unit<E, n> fold_units(Formula formula, const Unit<E, n>& lower,
                                       const Unit<E, n>& upper) {
  Unit<E, n> out;
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i)
    out.bits[i] = fold_element<E>(formula, lower.bits[i], upper.bits[i]);
  return out;
}

/// For all formulas but the usual one.
template <typename E, uint32_t n>
FARANDOLE_DEVICE_APART Unit<E, n> fold_units_apart(Formula formula, Unit<E, n> lower,
                                                   Unit<E, n> upper) {
  return fold_units(formula, lower, upper);
}

template <typename E, uint32_t n>
FARANDOLE_DEVICE_APART Unit<E, n> scale_unit_apart(Unit<E, n> unit, const Scaling& by) {
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i) unit.bits[i] = scale_element<E>(unit.bits[i], by);
  return unit;
}

template <typename E, uint32_t n>
FARANDOLE_DEVICE Unit<E, n> scale_unit(const Unit<E, n>& unit, const Scaling& by) {
  return by.applies != 0 ? scale_unit_apart(unit, by) : unit;
}

/// Where `U` begins at element `at` of an array.
template <typename U, typename E = void>
FARANDOLE_DEVICE const U* unit_at(const void* array, uint64_t at) {
  return reinterpret_cast<const U*>(static_cast<const char*>(array) + at * sizeof(U{}.bits[0]));
}
template <typename U>
FARANDOLE_DEVICE U* unit_at(void* array, uint64_t at) {
  return const_cast<U*>(unit_at<U>(static_cast<const void*>(array), at));
}

FARANDOLE_DEVICE uint32_t offset_in_pack(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) % 16);
}

/// How `count` elements are cut: `head` one by one, `packs` of `per_pack`, and the rest one by one.
struct Cut {
  uint64_t head, packs;
};

/// `offset`: where the arrays begin, modulo 16; `alike`: it is the same for all of them.
FARANDOLE_DEVICE Cut cut(uint64_t count, uint32_t offset, uint32_t element_bytes, uint32_t per_pack,
                         bool alike) {
  const uint64_t head = (16 - offset) % 16 / element_bytes;
  if (!alike || head >= count) return {count, 0};
  return {head, (count - head) / per_pack};
}

/// Thread `first` of `step`: calls packs(at) and ones(at) for its units; `at` in elements.
template <typename Packs, typename Ones>
FARANDOLE_DEVICE void for_units(uint64_t count, const Cut& by, uint32_t per_pack, uint64_t first,
                                uint64_t step, Packs packs, Ones ones) {
  for (uint64_t i = first; i < by.packs; i += step) packs(by.head + i * per_pack);
  const uint64_t middle = by.packs * per_pack;
  for (uint64_t i = first; i < count - middle; i += step) ones(i < by.head ? i : i + middle);
}

/// Of all threads of the grid.
FARANDOLE_DEVICE uint64_t grid_thread() {
  return uint64_t{block_index()} * thread_count() + thread_index();
}
FARANDOLE_DEVICE uint64_t grid_threads() { return uint64_t{block_count()} * thread_count(); }

}  // namespace farandole::cuda
