// The canonical fold of one unit of every source, and of whole arrays to all destinations.
#pragma once

#include <bit>

#include "cuda/kernels/units.cuh"

namespace farandole::cuda {

/// How many sources are loaded together and folded in registers: a power of two, since aligned
/// groups of so many are whole subtrees of the canonical tree. Sums of packs are what has to be
/// fast; all else goes one by one, in a tenth of the code.
template <typename U, bool adds>
inline constexpr uint32_t kGroup = adds && sizeof(U) >= 16 ? 8 : 1;

template <typename U, bool adds>
FARANDOLE_DEVICE U fold_two(Formula formula, const U& lower, const U& upper) {
  if constexpr (adds)
    return fold_units(Formula::add, lower, upper);
  else
    return bits_as<U>(
        fold_words_apart<U>(formula, bits_as<WordFor<U>>(lower), bits_as<WordFor<U>>(upper)));
}

/// Folds leaves from `first` on, `n` of them, at most kGroup. `leaves` reads them and says by
/// what they are scaled.
///
///   0 1 2 3 4 5 6     neighbours at distance 1, 2, 4; who has none waits. So it splits at the
///   0   2   4   6     largest power of two below the number of sources, on both sides, as the
///   0       4         canonical tree does.
///   0
template <typename U, bool adds, typename Leaves>
FARANDOLE_DEVICE U fold_group(Formula formula, uint32_t first, uint32_t n, const Leaves& leaves) {
  constexpr uint32_t kMost = kGroup<U, adds>;
  using Word = WordFor<U>;
  Word held[kMost];  // not units: behind a branch, each element would have a register
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < kMost; ++i)
    if (i < n) held[i] = bits_as<Word>(leaves.read(first + i));
  if (leaves.scaling().applies != 0) {  // once all are under way
    FARANDOLE_UNROLL
    for (uint32_t i = 0; i < kMost; ++i)
      if (i < n) held[i] = scale_word_apart<U>(held[i], leaves.scaling());
  }
  FARANDOLE_UNROLL
  for (uint32_t apart = 1; apart < kMost; apart *= 2) {
    FARANDOLE_UNROLL
    for (uint32_t i = 0; i + apart < kMost; i += 2 * apart)
      if (i + apart < n)
        held[i] = bits_as<Word>(
            fold_two<U, adds>(formula, bits_as<U>(held[i]), bits_as<U>(held[i + apart])));
  }
  return bits_as<U>(held[0]);
}

/// Folds any number of sources: whole subtrees of 1, 2, 4 … groups, joined as bits of a count are
/// carried; at the end those that are left, from the last to the first.
template <typename U, bool adds, typename Leaves>
FARANDOLE_DEVICE U fold_leaves(Formula formula, uint32_t sources, const Leaves& leaves) {
  constexpr uint32_t kMost = kGroup<U, adds>;
  constexpr uint32_t kLevels = std::bit_width(kMostRanks / kMost);
  U nodes[kLevels];  // nodes[k]: 2^k groups
  const uint32_t groups = (sources + kMost - 1) / kMost;
  FARANDOLE_LOOP
  for (uint32_t g = 0; g < groups; ++g) {
    const uint32_t first = g * kMost, rest = sources - first;
    U node = fold_group<U, adds>(formula, first, rest < kMost ? rest : kMost, leaves);
    if (groups == 1) return node;  // never leaves the registers
    uint32_t level = 0;
    FARANDOLE_LOOP
    for (; (g >> level & 1) != 0; ++level) node = fold_two<U, adds>(formula, nodes[level], node);
    nodes[level] = node;
  }
  uint32_t level = 0;
  while ((groups >> level & 1) == 0) ++level;
  U node = nodes[level];
  FARANDOLE_LOOP
  for (++level; level < kLevels; ++level)
    if ((groups >> level & 1) != 0) node = fold_two<U, adds>(formula, nodes[level], node);
  return node;
}

/// The sources' units at element `at`.
template <typename U>
struct LeavesAt {
  const Fold& job;
  uint64_t at;

  FARANDOLE_DEVICE U read(uint32_t i) const { return load_peer(unit_at<U>(job.sources[i], at)); }
  FARANDOLE_DEVICE const Scaling& scaling() const { return job.leaf; }
};

template <typename U>
FARANDOLE_DEVICE void finish_at(const Fold& job, uint64_t at, const U& folded) {
  const U result = scale_unit(folded, job.finish);
  FARANDOLE_LOOP
  for (uint32_t i = 0; i < job.destination_count; ++i)
    store_peer(unit_at<U>(job.destinations[i], at), result);
}

template <typename U>
struct Two {
  U lower, upper;
};
/// Sums of 32 bytes that each of a multiprocessor's 1024 threads has in flight, so memory is busy.
inline constexpr uint32_t kSumsTogether = 2;

FARANDOLE_DEVICE bool lie_alike(const Fold& job) {
  const uint32_t offset = offset_in_pack(job.destinations[0]);
  bool alike = true;
  for (uint32_t i = 0; i < job.source_count; ++i) alike &= offset_in_pack(job.sources[i]) == offset;
  for (uint32_t i = 1; i < job.destination_count; ++i)
    alike &= offset_in_pack(job.destinations[i]) == offset;
  return alike;
}

template <typename E>
FARANDOLE_DEVICE Cut cut_of(const Fold& job) {
  return cut(job.count, offset_in_pack(job.destinations[0]), sizeof(BitsOfElement<E>), kPerPack<E>,
             lie_alike(job));
}

/// Folds all sources to every destination. Destinations may be sources: all are read before one is
/// written.
template <typename E, bool adds>
FARANDOLE_DEVICE void fold_all(const Fold& job) {
  for_units<1, kPerPack<E>>(
      job.count, cut_of<E>(job), turns_of_grid(),
      [&]<uint32_t n>(Elements<n>, uint64_t at) {
        using U = Unit<E, n>;
        return fold_leaves<U, adds>(job.formula, job.source_count, LeavesAt<U>{job, at});
      },
      [&]<uint32_t n>(Elements<n>, uint64_t at, const Unit<E, n>& folded) {
        finish_at(job, at, folded);
      });
}

/// Sums of two are the most frequent: with so few sources, several units are read together.
template <typename E>
FARANDOLE_DEVICE void sum_two(const Fold& job) {
  for_units<kSumsTogether, kPerPack<E>>(
      job.count, cut_of<E>(job), turns_of_grid(),
      [&]<uint32_t n>(Elements<n>, uint64_t at) {
        using U = Unit<E, n>;
        return Two<U>{load_peer(unit_at<U>(job.sources[0], at)),
                      load_peer(unit_at<U>(job.sources[1], at))};
      },
      [&]<uint32_t n>(Elements<n>, uint64_t at, const Two<Unit<E, n>>& of) {
        finish_at(job, at, fold_units(Formula::add, of.lower, of.upper));
      });
}

/// By all threads of the grid.
template <typename E>
FARANDOLE_DEVICE void fold(const Fold& job) {
  if (job.source_count == 0 || job.destination_count == 0) return;
  if (job.formula != Formula::add)
    fold_all<E, false>(job);
  else if (job.source_count == 2 && job.leaf.applies == 0)
    sum_two<E>(job);
  else
    fold_all<E, true>(job);
}

}  // namespace farandole::cuda
