// Buckets: many tensors into one stretch of memory, and back, with scale and cast on the way.
#pragma once

#include "cuda/kernels/units.cuh"

namespace farandole::cuda {

/// Whether the factor applies before the cast or behind it: in the bucket's dtype.
enum class ScaleAt : uint8_t { source, destination };

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

template <ScaleAt where, typename From, typename To, uint32_t n>
FARANDOLE_DEVICE void copy_unit(const Piece& piece, uint64_t at, const Scaling& scaling) {
  Unit<From, n> in = load(unit_at<Unit<From, n>>(piece.from, at));
  if constexpr (where == ScaleAt::source) in = scale_unit(in, scaling);
  Unit<To, n> out;
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i) out.bits[i] = cast_element<From, To>(in.bits[i]);
  if constexpr (where == ScaleAt::destination) out = scale_unit(out, scaling);
  store(unit_at<Unit<To, n>>(piece.to, at), out);
}

template <ScaleAt where, typename From, typename To>
FARANDOLE_DEVICE void copy_chunk(const Piece& piece, uint64_t first, const Scaling& scaling) {
  constexpr uint32_t kFrom = sizeof(BitsOfElement<From>), kTo = sizeof(BitsOfElement<To>);
  constexpr uint32_t n = 16 / (kFrom < kTo ? kFrom : kTo);  // sixteen bytes of the narrower side
  const uint64_t rest = piece.count - first;
  const uint64_t count = rest < kChunkElements ? rest : kChunkElements;
  const char* from = static_cast<const char*>(piece.from) + first * kFrom;
  const char* to = static_cast<const char*>(piece.to) + first * kTo;
  const uint64_t head = (16 - offset_in_pack(to)) % 16 / kTo;
  const bool alike = offset_in_pack(from + head * kFrom) == 0;
  for_units(
      count, cut(count, offset_in_pack(to), kTo, n, alike), n, thread_index(), thread_count(),
      [&](uint64_t at) { copy_unit<where, From, To, n>(piece, first + at, scaling); },
      [&](uint64_t at) { copy_unit<where, From, To, 1>(piece, first + at, scaling); });
}

/// Blocks take chunks in turn.
template <ScaleAt where, typename From, typename To>
FARANDOLE_DEVICE void copy_pieces(const Pieces& p) {
  for (uint64_t chunk = block_index(); chunk < p.chunks; chunk += block_count()) {
    const Piece& piece = piece_of(p.pieces, p.piece_count, chunk);
    copy_chunk<where, From, To>(piece, (chunk - piece.first_chunk) * kChunkElements, p.scaling);
  }
}

template <typename From, typename To>
FARANDOLE_DEVICE void gather(const Pieces& p) {
  copy_pieces<ScaleAt::destination, From, To>(p);
}
template <typename From, typename To>
FARANDOLE_DEVICE void scatter(const Pieces& p) {
  copy_pieces<ScaleAt::source, From, To>(p);
}

}  // namespace farandole::cuda
