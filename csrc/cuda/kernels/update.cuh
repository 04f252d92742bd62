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

template <typename E, uint32_t n, typename Rule>
FARANDOLE_DEVICE void update_unit(const UpdatePiece& piece, const Rule& rule, uint64_t at) {
  using Wide = typename Element<E>::Wide;
  constexpr int kSlots = Rule::kSlots;
  const auto unit = [at](auto* array) { return unit_at<Unit<E, n>>(array, at); };
  Unit<E, n> values = load(unit(piece.value)), states[kMostSlots] = {};
  const Unit<E, n> gradients = load(unit(piece.gradient));
  FARANDOLE_UNROLL
  for (int s = 0; s < kSlots; ++s) states[s] = load(unit(piece.state[s]));
  FARANDOLE_UNROLL
  for (uint32_t i = 0; i < n; ++i) {
    Wide value = Element<E>::widen(values.bits[i]), state[kMostSlots] = {};
    FARANDOLE_UNROLL
    for (int s = 0; s < kSlots; ++s) state[s] = Element<E>::widen(states[s].bits[i]);
    rule(value, Element<E>::widen(gradients.bits[i]), state, SquareRoot());
    values.bits[i] = Element<E>::narrow(value);
    FARANDOLE_UNROLL
    for (int s = 0; s < kSlots; ++s) states[s].bits[i] = Element<E>::narrow(state[s]);
  }
  store(unit(piece.value), values);
  store(unit(piece.shared), values);
  FARANDOLE_UNROLL
  for (int s = 0; s < kSlots; ++s) store(unit(piece.state[s]), states[s]);
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
  for_units(
      count, cut(count, offset, sizeof(BitsOfElement<E>), n, alike), n, thread_index(),
      thread_count(), [&](uint64_t at) { update_unit<E, n>(piece, rule, first + at); },
      [&](uint64_t at) { update_unit<E, 1>(piece, rule, first + at); });
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
