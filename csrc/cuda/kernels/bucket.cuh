// Buckets: many tensors into one stretch of memory, and back, with scale and cast on the way.
#pragma once

#include "cuda/kernels/units.cuh"

namespace farandole::cuda {

/// Whether the factor applies before the cast or behind it: in the bucket's dtype.
enum class ScaleAt : uint8_t { nowhere, source, destination };

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

template <ScaleAt where, typename From, typename To, uint32_t n>
FARANDOLE_DEVICE Unit<To, n> copied(Unit<From, n> in, const Scaling& scaling) {
  if constexpr (where == ScaleAt::source) in = scale_unit(in, scaling);
  Unit<To, n> out;
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i) out.bits[i] = cast_element<From, To>(in.bits[i]);
  if constexpr (where == ScaleAt::destination) out = scale_unit(out, scaling);
  return out;
}

/// How a chunk is cut, for accesses of sixteen bytes on the wider side: there begins `wide`, of
/// `n` elements in a pack, and `narrow` on the other one, with `narrow_bytes` of each.
FARANDOLE_DEVICE Cut cut_of_both(uint64_t count, const char* wide, const char* narrow, uint32_t n,
                                 uint32_t narrow_bytes) {
  const uint32_t wide_bytes = 16 / n, offset = offset_in_pack(wide);
  const uint32_t head = (16 - offset) % 16 / wide_bytes;
  const bool alike = offset_in_pack(narrow + head * narrow_bytes) % (n * narrow_bytes) == 0;
  return cut(count, offset, wide_bytes, n, alike);
}

template <ScaleAt where, uint32_t together, typename From, typename To>
FARANDOLE_DEVICE void copy_chunk(const Piece& piece, uint64_t first, const Scaling& scaling) {
  constexpr uint32_t kFrom = sizeof(BitsOfElement<From>), kTo = sizeof(BitsOfElement<To>);
  constexpr bool widens = kTo > kFrom;
  constexpr uint32_t n = 16 / (widens ? kTo : kFrom);
  const uint64_t rest = piece.count - first;
  const uint64_t count = rest < kChunkElements ? rest : kChunkElements;
  const char* const from = static_cast<const char*>(piece.from) + first * kFrom;
  char* const to = static_cast<char*>(piece.to) + first * kTo;
  for_units<together, n>(
      count, cut_of_both(count, widens ? to : from, widens ? from : to, n, widens ? kFrom : kTo),
      turns_of_block(),
      [&]<uint32_t m>(Elements<m>, uint64_t at) { return load(unit_at<Unit<From, m>>(from, at)); },
      [&]<uint32_t m>(Elements<m>, uint64_t at, const Unit<From, m>& in) {
        store(unit_at<Unit<To, m>>(to, at), copied<where, From, To, m>(in, scaling));
      });
}

/// Blocks take chunks in turn.
template <ScaleAt where, uint32_t together, typename From, typename To>
FARANDOLE_DEVICE void copy_pieces(const Pieces& p) {
  FARANDOLE_LOOP
  for (uint64_t chunk = block_index(); chunk < p.chunks; chunk += block_count()) {
    const Piece piece = piece_of_block(p.pieces, p.piece_count, chunk);
    copy_chunk<where, together, From, To>(piece, (chunk - piece.first_chunk) * kChunkElements,
                                          p.scaling);
  }
}

template <typename From, typename To>
FARANDOLE_DEVICE void gather(const Pieces& p) {
  if (p.scaling.applies != 0)
    copy_pieces<ScaleAt::destination, 1, From, To>(p);
  else
    copy_pieces<ScaleAt::nowhere, kCopiesTogether, From, To>(p);
}
template <typename From, typename To>
FARANDOLE_DEVICE void scatter(const Pieces& p) {
  if (p.scaling.applies != 0)
    copy_pieces<ScaleAt::source, 1, From, To>(p);
  else
    copy_pieces<ScaleAt::nowhere, kCopiesTogether, From, To>(p);
}

}  // namespace farandole::cuda
