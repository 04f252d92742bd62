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
    return fold_units_apart(formula, lower, upper);
}

/// Folds source(first) … source(first + n - 1), at most kGroup of them.
///
///   0 1 2 3 4 5 6     neighbours at distance 1, 2, 4; who has none waits. So it splits at the
///   0   2   4   6     largest power of two below the number of sources, on both sides, as the
///   0       4         canonical tree does.
///   0
template <typename U, bool adds, typename Source>
FARANDOLE_DEVICE U fold_group(Formula formula, uint32_t first, uint32_t n, Source source) {
  constexpr uint32_t kMost = kGroup<U, adds>;
  U held[kMost];
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < kMost; ++i)
    if (i < n) held[i] = source(first + i);
  FARANDOLE_UNROLL
  for (uint32_t apart = 1; apart < kMost; apart *= 2) {
    FARANDOLE_UNROLL
    for (uint32_t i = 0; i + apart < kMost; i += 2 * apart)
      if (i + apart < n) held[i] = fold_two<U, adds>(formula, held[i], held[i + apart]);
  }
  return held[0];
}

/// Folds any number of sources: whole subtrees of 1, 2, 4 … groups, joined as bits of a count are
/// carried; at the end those that are left, from the last to the first.
template <typename U, bool adds, typename Source>
FARANDOLE_DEVICE U fold_sources(Formula formula, uint32_t sources, Source source) {
  constexpr uint32_t kMost = kGroup<U, adds>;
  constexpr uint32_t kLevels = std::bit_width(kMostRanks / kMost);
  U nodes[kLevels];  // nodes[k]: 2^k groups
  const uint32_t groups = (sources + kMost - 1) / kMost;
  FARANDOLE_LOOP
  for (uint32_t g = 0; g < groups; ++g) {
    const uint32_t first = g * kMost, rest = sources - first;
    U node = fold_group<U, adds>(formula, first, rest < kMost ? rest : kMost, source);
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

/// One unit at element `at`: of every source, folded, to every destination. Destinations may be
/// sources: all are read before one is written.
template <typename U, bool adds>
FARANDOLE_DEVICE void fold_at(const Fold& job, uint64_t at) {
  const U folded = fold_sources<U, adds>(job.formula, job.source_count, [&](uint32_t i) {
    const U unit = load_peer(unit_at<U>(job.sources[i], at));
    return (job.raw >> i & 1) != 0 ? scale_unit(unit, job.leaf) : unit;
  });
  const U result = scale_unit(folded, job.finish);
  for (uint32_t i = 0; i < job.destination_count; ++i)
    store_peer(unit_at<U>(job.destinations[i], at), result);
}

FARANDOLE_DEVICE bool lie_alike(const Fold& job) {
  const uint32_t offset = offset_in_pack(job.destinations[0]);
  bool alike = true;
  for (uint32_t i = 0; i < job.source_count; ++i) alike &= offset_in_pack(job.sources[i]) == offset;
  for (uint32_t i = 1; i < job.destination_count; ++i)
    alike &= offset_in_pack(job.destinations[i]) == offset;
  return alike;
}

template <typename E, bool adds>
FARANDOLE_DEVICE void fold_all(const Fold& job) {
  const Cut by = cut(job.count, offset_in_pack(job.destinations[0]), sizeof(BitsOfElement<E>),
                     kPerPack<E>, lie_alike(job));
  for_units(
      job.count, by, kPerPack<E>, grid_thread(), grid_threads(),
      [&](uint64_t at) { fold_at<Packed<E>, adds>(job, at); },
      [&](uint64_t at) { fold_at<One<E>, adds>(job, at); });
}

/// By all threads of the grid. Meets nobody: sources are ready, and nobody else touches
/// destinations meanwhile.
template <typename E>
FARANDOLE_DEVICE void fold(const Fold& job) {
  if (job.source_count == 0 || job.destination_count == 0) return;
  if (job.formula == Formula::add)
    fold_all<E, true>(job);
  else
    fold_all<E, false>(job);
}

}  // namespace farandole::cuda
