// Units: what a thread moves at a time. Sixteen bytes where arrays allow it, one element at their
// heads and tails.
#pragma once

#include "cuda/kernels/arithmetic.cuh"

namespace farandole::cuda {

/// `n` elements, a power of two, in one access; of more than sixteen bytes in several.
template <typename E, uint32_t n>
struct alignas(n * sizeof(BitsOfElement<E>) < 16 ? n * sizeof(BitsOfElement<E>) : 16) Unit {
  BitsOfElement<E> bits[n];
};

template <typename E>
using One = Unit<E, 1>;
template <typename E>
inline constexpr uint32_t kPerPack = 16 / sizeof(BitsOfElement<E>);
template <typename E>
using Packed = Unit<E, kPerPack<E>>;

FARANDOLE_DEVICE Packed<BFloat16> fold_units(Formula formula, const Packed<BFloat16>& lower,
                                             const Packed<BFloat16>& upper) {
  const Pack a = bits_as<Pack>(lower), b = bits_as<Pack>(upper);
  const auto fold = [formula](float x, float y) { return Element<BFloat16>::fold(formula, x, y); };
  Pack out;
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t x = a.words[i], y = b.words[i];
    out.words[i] = bfloat16_pair(fold(first_bfloat16(x), first_bfloat16(y)),
                                 fold(second_bfloat16(x), second_bfloat16(y)));
  }
  return bits_as<Packed<BFloat16>>(out);
}

template <typename E, uint32_t n>
FARANDOLE_DEVICE Unit<E, n> fold_units(Formula formula, const Unit<E, n>& lower,
                                       const Unit<E, n>& upper) {
  Unit<E, n> out;
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i)
    out.bits[i] = fold_element<E>(formula, lower.bits[i], upper.bits[i]);
  return out;
}

// Functions apart take units as words: small elements would have a register each.

/// For all formulas but the usual one.
template <typename U>
FARANDOLE_DEVICE_APART WordFor<U> fold_words_apart(Formula formula, WordFor<U> lower,
                                                   WordFor<U> upper) {
  return bits_as<WordFor<U>>(fold_units(formula, bits_as<U>(lower), bits_as<U>(upper)));
}

FARANDOLE_DEVICE Packed<BFloat16> scale_elements(const Packed<BFloat16>& unit, const Scaling& by) {
  Pack pack = bits_as<Pack>(unit);
  FARANDOLE_UNROLL
  for (uint32_t& pair : pack.words)
    pair = bfloat16_pair(first_bfloat16(pair) * by.float32, second_bfloat16(pair) * by.float32);
  return bits_as<Packed<BFloat16>>(pack);
}

template <typename E, uint32_t n>
FARANDOLE_DEVICE Unit<E, n> scale_elements(Unit<E, n> unit, const Scaling& by) {
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i) unit.bits[i] = scale_element<E>(unit.bits[i], by);
  return unit;
}
template <typename U>
FARANDOLE_DEVICE_APART WordFor<U> scale_word_apart(WordFor<U> word, const Scaling& by) {
  return bits_as<WordFor<U>>(scale_elements(bits_as<U>(word), by));
}

/// Floats are scaled inline: a mean is as frequent as a sum, and a call would cost more.
template <typename E, uint32_t n>
FARANDOLE_DEVICE Unit<E, n> scale_unit(const Unit<E, n>& unit, const Scaling& by) {
  using U = Unit<E, n>;
  if (by.applies == 0) return unit;
  if constexpr (std::is_integral_v<E>)
    return bits_as<U>(scale_word_apart<U>(bits_as<WordFor<U>>(unit), by));
  else
    return scale_elements(unit, by);
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

/// The units that one of several threads takes. Below 2^32 elements, `Index` is uint32_t: addresses
/// of several units take fewer registers.
template <typename Index>
struct Turns {
  Index first, step;
};
FARANDOLE_DEVICE Turns<uint32_t> turns_of_block() { return {thread_index(), thread_count()}; }
FARANDOLE_DEVICE Turns<uint64_t> turns_of_grid() {
  return {uint64_t{block_index()} * thread_count() + thread_index(),
          uint64_t{block_count()} * thread_count()};
}

/// write(i, read(i)) for the thread's i below `count`, `together` at a time: what they read is
/// under way at once. The compiler would not do that by itself: it cannot know that what is
/// written is not read next.
template <uint32_t together, typename Index, typename Read, typename Write>
FARANDOLE_DEVICE void for_each(Index count, const Turns<Index>& turns, Read read, Write write) {
  FARANDOLE_LOOP
  for (Index i = turns.first; i < count; i += together * turns.step) {
    decltype(read(i)) held[together];
    FARANDOLE_UNROLL
    for (uint32_t k = 0; k < together; ++k) {
      const Index next = i + k * turns.step;
      held[k] = read(next < count ? next : i);  // behind the end once more: no branch between reads
    }
    FARANDOLE_UNROLL
    for (uint32_t k = 0; k < together; ++k)
      if (i + k * turns.step < count) write(i + k * turns.step, held[k]);
  }
}

/// Says how many elements a unit has.
template <uint32_t n>
struct Elements {};

/// The same for the thread's units, of `n` elements or one: write(Elements<n>(), at,
/// read(Elements<n>(), at)), `at` in elements.
template <uint32_t together, uint32_t n, typename Index, typename Read, typename Write>
FARANDOLE_DEVICE void for_units(uint64_t count, const Cut& by, const Turns<Index>& turns, Read read,
                                Write write) {
  const auto head = static_cast<Index>(by.head), packs = static_cast<Index>(by.packs);
  const Index middle = packs * n, ones = static_cast<Index>(count) - middle;
  for_each<together>(
      packs, turns, [&](Index i) { return read(Elements<n>(), head + i * n); },
      [&](Index i, const auto& held) { write(Elements<n>(), head + i * n, held); });
  const auto place = [&](Index i) { return i < head ? i : i + middle; };
  for_each<together>(
      ones, turns, [&](Index i) { return read(Elements<1>(), place(i)); },
      [&](Index i, const auto& held) { write(Elements<1>(), place(i), held); });
}

}  // namespace farandole::cuda
