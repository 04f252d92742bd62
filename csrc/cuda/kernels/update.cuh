// The optimizer's step on elements whose reduced gradients lie on a device: update.h's formulas.
#pragma once

#include "cuda/kernels/bucket.cuh"
#include "fold/update_rules.h"

namespace farandole::cuda {

struct SquareRoot {
  template <typename Wide>
  FARANDOLE_DEVICE Wide operator()(Wide value) const {
    return square_root(value);
  }
};

template <typename U>
struct UpdateUnits {
  U values, gradients, states[kMostSlots];
};

template <typename U, int slots>
FARANDOLE_DEVICE UpdateUnits<U> units_of(const UpdatePiece& piece, uint64_t at) {
  UpdateUnits<U> of{load(unit_at<U>(piece.value, at)), load(unit_at<U>(piece.gradient, at)), {}};
  FARANDOLE_UNROLL
  for (int s = 0; s < slots; ++s) of.states[s] = load(unit_at<U>(piece.state[s], at));
  return of;
}

template <typename E, uint32_t n, typename Rule>
FARANDOLE_DEVICE void update_units(const UpdatePiece& piece, const Rule& rule, uint64_t at,
                                   UpdateUnits<Unit<E, n>> of) {
  using Wide = typename Element<E>::Wide;
  constexpr int kSlots = Rule::kSlots;
  const auto unit = [at](auto* array) { return unit_at<Unit<E, n>>(array, at); };
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i) {
    Wide value = Element<E>::widen(of.values.bits[i]), state[kMostSlots] = {};
    FARANDOLE_UNROLL
    for (int s = 0; s < kSlots; ++s) state[s] = Element<E>::widen(of.states[s].bits[i]);
    rule(value, Element<E>::widen(of.gradients.bits[i]), state, SquareRoot());
    of.values.bits[i] = Element<E>::narrow(value);
    FARANDOLE_UNROLL
    for (int s = 0; s < kSlots; ++s) of.states[s].bits[i] = Element<E>::narrow(state[s]);
  }
  store(unit(piece.value), of.values);
  store(unit(piece.shared), of.values);
  FARANDOLE_UNROLL
  for (int s = 0; s < kSlots; ++s) store(unit(piece.state[s]), of.states[s]);
}

template <typename E, template <typename> typename Rule>
FARANDOLE_DEVICE void update_chunk(const UpdatePiece& piece, uint64_t first) {
  constexpr uint32_t n = kPerPack<E>;
  using Made = Rule<typename Element<E>::Wide>;
  constexpr int kSlots = Made::kSlots;
  const Made rule(piece.factors);
  const uint64_t rest = piece.count - first;
  const uint64_t count = rest < kChunkElements ? rest : kChunkElements;
  const uint32_t offset = offset_in_pack(unit_at<One<E>>(piece.value, first));
  bool alike = offset_in_pack(unit_at<One<E>>(piece.gradient, first)) == offset &&
               offset_in_pack(unit_at<One<E>>(piece.shared, first)) == offset;
  for (int s = 0; s < kSlots; ++s)
    alike = alike && offset_in_pack(unit_at<One<E>>(piece.state[s], first)) == offset;
  for_units<1, n>(
      count, cut(count, offset, sizeof(BitsOfElement<E>), n, alike), turns_of_block(),
      [&]<uint32_t m>(Elements<m>, uint64_t at) {
        return units_of<Unit<E, m>, kSlots>(piece, first + at);
      },
      [&]<uint32_t m>(Elements<m>, uint64_t at, const UpdateUnits<Unit<E, m>>& of) {
        update_units<E, m>(piece, rule, first + at, of);
      });
}

/// Blocks take chunks in turn.
template <typename E>
FARANDOLE_DEVICE void update(const Updates& p) {
  for (uint64_t chunk = block_index(); chunk < p.chunks; chunk += block_count()) {
    const UpdatePiece& piece = piece_of(p.pieces, static_cast<uint32_t>(p.piece_count), chunk);
    const uint64_t first = (chunk - piece.first_chunk) * kChunkElements;
    switch (piece.kind) {
      case UpdateKind::sgd:
        update_chunk<E, Sgd>(piece, first);
        break;
      case UpdateKind::momentum:
        update_chunk<E, Momentum>(piece, first);
        break;
      case UpdateKind::adam:
        update_chunk<E, Adam>(piece, first);
        break;
    }
  }
}

}  // namespace farandole::cuda
