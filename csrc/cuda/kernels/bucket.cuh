// Buckets: many tensors into one stretch of memory, and back, scaled on the way.
#pragma once

#include "cuda/kernels/units.cuh"

namespace farandole::cuda {

/// A chunk of float32 is as many units for each of kThreads.
inline constexpr uint32_t kCopiesTogether = 4;

/// The last of the pieces whose first chunk is not behind `chunk`.
template <typename AnyPiece>
FARANDOLE_DEVICE const AnyPiece& piece_of(const AnyPiece* pieces, uint32_t count, uint64_t chunk) {
  uint32_t below = 0, above = count;
  while (above - below > 1) {
    const uint32_t middle = below + (above - below) / 2;
    (pieces[middle].first_chunk <= chunk ? below : above) = middle;
  }
  return pieces[below];
}

/// The same, by all threads of a block: each looks at a piece of its own, all at once. One by one,
/// looks would take longer than the chunk.
FARANDOLE_DEVICE const Piece& piece_of_block(const Piece* pieces, uint32_t count, uint64_t chunk) {
  const uint32_t apart = (count + thread_count() - 1) / thread_count();
  const uint32_t mine = thread_index() * apart;
  const uint32_t begun = block_votes(mine < count && pieces[mine].first_chunk <= chunk);
  const uint32_t below = (begun - 1) * apart, rest = count - below;
  return piece_of(pieces + below, rest < apart ? rest : apart, chunk);
}

template <uint32_t together, bool scales, typename E>
FARANDOLE_DEVICE void copy_chunk(const Piece& piece, uint64_t first, const Scaling& scaling) {
  constexpr uint32_t n = kPerPack<E>;
  const uint64_t rest = piece.count - first;
  const uint64_t count = rest < kChunkElements ? rest : kChunkElements;
  const void* const from = unit_at<One<E>>(piece.from, first);
  void* const to = unit_at<One<E>>(piece.to, first);
  const uint32_t offset = offset_in_pack(to);
  for_units<together, n>(
      count, cut(count, offset, sizeof(BitsOfElement<E>), n, offset_in_pack(from) == offset),
      turns_of_block(),
      [&]<uint32_t m>(Elements<m>, uint64_t at) { return load(unit_at<Unit<E, m>>(from, at)); },
      [&]<uint32_t m>(Elements<m>, uint64_t at, const Unit<E, m>& in) {
        store(unit_at<Unit<E, m>>(to, at), scales ? scale_unit(in, scaling) : in);
      });
}

/// Blocks take chunks in turn.
template <uint32_t together, bool scales, typename E>
FARANDOLE_DEVICE void copy_chunks(const Pieces& p) {
  FARANDOLE_LOOP
  for (uint64_t chunk = block_index(); chunk < p.chunks; chunk += block_count()) {
    const Piece piece = piece_of_block(p.pieces, p.piece_count, chunk);
    copy_chunk<together, scales, E>(piece, (chunk - piece.first_chunk) * kChunkElements, p.scaling);
  }
}

template <typename E>
FARANDOLE_DEVICE void copy_pieces(const Pieces& p) {
  if (p.scaling.applies != 0)
    copy_chunks<1, true, E>(p);
  else
    copy_chunks<kCopiesTogether, false, E>(p);
}

}  // namespace farandole::cuda
