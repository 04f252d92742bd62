// Terms of a norm, of elements whose reduced gradients lie on a device: each is what
// fold/update.h's sum_of_squares or largest_magnitude makes of one tile of one parameter, by the
// same additions in the same order. The host adds terms up.
#pragma once

#include "cuda/kernels/bucket.cuh"

namespace farandole::cuda {

FARANDOLE_DEVICE double larger(double most, double x) { return x > most || x != x ? x : most; }

/// One lane's term, of its elements of a tile.
template <typename E>
FARANDOLE_DEVICE double norm_lane(const NormPiece& piece, uint64_t first, uint64_t end,
                                  uint32_t lane, bool largest) {
  double made = 0;
  for (uint64_t i = first + lane; i < end; i += kNormLanes) {
    const double x = Element<E>::widen(load(unit_at<One<E>>(piece.gradient, i)).bits[0]);
    made = largest ? larger(made, x < 0 ? -x : x) : made + x * x;
  }
  return made;
}

/// All lanes of a tile.
FARANDOLE_DEVICE double norm_term(const double* lanes, bool largest) {
  double made[kNormLanes];
  for (uint32_t i = 0; i < kNormLanes; ++i) made[i] = load(&lanes[i]);
  if (largest) {
    for (uint32_t i = 0; i < kNormLanes; ++i) made[0] = larger(made[0], made[i]);
    return made[0];
  }
  for (uint32_t half = kNormLanes / 2; half > 0; half /= 2)
    for (uint32_t i = 0; i < half; ++i) made[i] += made[i + half];
  return made[0];
}

/// Blocks take groups of terms in turn; a term has a lane for each of kNormLanes threads, or fewer
/// threads have several.
template <typename E>
FARANDOLE_DEVICE void norms(const Norms& p) {
  const uint32_t fit = thread_count() / kNormLanes, together = fit > 0 ? fit : 1;
  double* const lanes = p.scratch + uint64_t{block_index()} * together * kNormLanes;
  const bool largest = p.largest != 0;
  for (uint64_t group = block_index(); group * together < p.terms; group += block_count()) {
    const uint64_t begin = group * together;
    const uint64_t rest = p.terms - begin;
    const uint32_t here = rest < together ? static_cast<uint32_t>(rest) : together;
    for (uint32_t i = thread_index(); i < here * kNormLanes; i += thread_count()) {
      const uint64_t term = begin + i / kNormLanes;
      const NormPiece& piece = piece_of(p.pieces, static_cast<uint32_t>(p.piece_count), term);
      const uint64_t tile = (term - piece.first_chunk) * p.tile;
      const uint64_t first = tile > piece.begin ? tile - piece.begin : 0;
      const uint64_t full = tile + p.tile - piece.begin;
      const uint64_t end = full < piece.count ? full : piece.count;
      store(&lanes[i], norm_lane<E>(piece, first, end, i % kNormLanes, largest));
    }
    block_barrier();
    for (uint32_t t = thread_index(); t < here; t += thread_count())
      store(&p.made[begin + t], norm_term(&lanes[t * kNormLanes], largest));
    block_barrier();
  }
}

}  // namespace farandole::cuda
