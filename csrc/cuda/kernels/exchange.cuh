// Exchanges among ranks whose kernels run at the same time: two-shot, one-shot, deliver.
#pragma once

#include "cuda/kernels/fold.cuh"
#include "cuda/kernels/meet.cuh"

namespace farandole::cuda {

/// Everybody's input is there once all have come: kernels start behind what made it. Everybody's
/// output is, once all have met again in every channel, that is when this kernel has ended.
/// With nobody else it only folds.
template <typename E>
FARANDOLE_DEVICE void two_shot(const TwoShot& p) {
  const bool alone = p.peers.size == 1;
  if (!alone && !meet(p.peers)) return;
  fold<E>(p.fold);
  if (!alone) meet(p.peers);
}

template <typename U>
FARANDOLE_DEVICE U* slot_unit(const OneShot& p, uint32_t owner, uint32_t set, uint32_t from,
                              uint32_t at) {
  char* slot =
      static_cast<char*>(p.mailboxes[owner]) + slot_offset(block_index(), set, from, p.peers.size);
  return unit_at<U>(slot, at);
}

/// One unit of this rank's input into its slot in every mailbox.
template <typename U>
FARANDOLE_DEVICE void hand_over(const OneShot& p, uint32_t set, uint64_t at, uint32_t in_slot) {
  const U unit = load(unit_at<U>(p.input, at));
  for (uint32_t i = 1; i <= p.peers.size; ++i) {  // each begins with another peer
    const uint32_t owner = (p.peers.rank + i) % p.peers.size;
    store_peer(slot_unit<U>(p, owner, set, p.peers.rank, in_slot), unit);
  }
}

/// The same unit of all inputs, from this rank's own mailbox.
template <typename U, bool adds>
FARANDOLE_DEVICE void take_in(const OneShot& p, uint32_t set, uint64_t at, uint32_t in_slot) {
  const U folded = fold_sources<U, adds>(p.formula, p.peers.size, [&](uint32_t from) {
    return scale_unit(load_peer(slot_unit<U>(p, p.peers.rank, set, from, in_slot)), p.leaf);
  });
  store(unit_at<U>(p.output, at), scale_unit(folded, p.finish));
}

/// In rounds; in each, every block hands over one slot. Packs as slots have them: whole ones, and
/// behind them the last elements one by one. `aligned`: the user's memory allows packs, too.
template <typename E, typename PackBody, typename OneBody>
FARANDOLE_DEVICE void for_slot(uint64_t count, bool aligned, PackBody pack, OneBody one) {
  for_units(count, cut(count, 0, 1, kPerPack<E>, aligned), kPerPack<E>, thread_index(),
            thread_count(), pack, one);
}

template <typename E, bool adds>
FARANDOLE_DEVICE void take_in_slot(const OneShot& p, uint32_t set, uint64_t first, uint64_t count) {
  for_slot<E>(
      count, offset_in_pack(p.output) == 0,
      [&](uint64_t at) { take_in<Packed<E>, adds>(p, set, first + at, static_cast<uint32_t>(at)); },
      [&](uint64_t at) { take_in<One<E>, adds>(p, set, first + at, static_cast<uint32_t>(at)); });
}

/// A set is written again two meetings later. Whoever writes has met everybody in between, and a
/// rank comes to a meeting when it has done with what it read before: two sets are enough, and the
/// kernel ends without waiting for those who still read.
template <typename E>
FARANDOLE_DEVICE void one_shot(const OneShot& p) {
  constexpr uint64_t kSlot = kSlotBytes / sizeof(BitsOfElement<E>);
  for (uint64_t first = block_index() * kSlot; first < p.count; first += block_count() * kSlot) {
    const uint64_t rest = p.count - first, count = rest < kSlot ? rest : kSlot;
    const uint32_t set = next_epoch(p.peers, block_index()) % 2;
    for_slot<E>(
        count, offset_in_pack(p.input) == 0,
        [&](uint64_t at) { hand_over<Packed<E>>(p, set, first + at, static_cast<uint32_t>(at)); },
        [&](uint64_t at) { hand_over<One<E>>(p, set, first + at, static_cast<uint32_t>(at)); });
    if (!meet(p.peers)) return;
    if (p.formula == Formula::add)
      take_in_slot<E, true>(p, set, first, count);
    else
      take_in_slot<E, false>(p, set, first, count);
  }
}

template <typename W>
FARANDOLE_DEVICE const W* word_at(const void* base, uint64_t offset) {
  return reinterpret_cast<const W*>(static_cast<const char*>(base) + offset);
}
template <typename W>
FARANDOLE_DEVICE void move_word(const void* from, void* to, uint64_t offset) {
  store_peer(const_cast<W*>(word_at<W>(to, offset)), load_peer(word_at<W>(from, offset)));
}

/// `bytes` from one place to another, by all threads of the grid: `head` one by one, then in words
/// of `W`, and the rest one by one.
template <typename W>
FARANDOLE_DEVICE void move_words(const void* from, void* to, uint64_t bytes, uint64_t head) {
  const uint64_t words = (bytes - head) / sizeof(W), middle = words * sizeof(W);
  for (uint64_t i = grid_thread(); i < words; i += grid_threads())
    move_word<W>(from, to, head + i * sizeof(W));
  for (uint64_t i = grid_thread(); i < bytes - middle; i += grid_threads())
    move_word<uint8_t>(from, to, i < head ? i : i + middle);
}

/// In the widest words that both ends allow.
FARANDOLE_DEVICE void move(const void* from, void* to, uint64_t bytes) {
  if (from == to) return;
  const uint32_t source = offset_in_pack(from), target = offset_in_pack(to);
  const auto head = [&](uint32_t width) {
    const uint64_t until = (width - target % width) % width;
    return until < bytes ? until : bytes;
  };
  if (source == target)
    move_words<Pack>(from, to, bytes, head(16));
  else if (source % 4 == target % 4)
    move_words<uint32_t>(from, to, bytes, head(4));
  else
    move_words<uint8_t>(from, to, bytes, 0);
}

/// Peers' outputs may be overwritten once all have come; this rank's is complete at the end.
FARANDOLE_DEVICE void deliver(const Deliver& p) {
  if (!meet(p.peers)) return;
  for (uint32_t i = 0; i < p.moves; ++i) move(p.from[i], p.to[i], p.bytes[i]);
  meet(p.peers);
}

}  // namespace farandole::cuda
