// An all-reduce among ranks whose kernels run at the same time: one-shot.
#pragma once

#include "cuda/kernels/fold.cuh"
#include "cuda/kernels/meet.cuh"

namespace farandole::cuda {

template <typename U>
FARANDOLE_DEVICE U* slot_unit(const OneShot& p, uint32_t owner, uint32_t set, uint32_t from,
                              uint32_t at) {
  char* slot =
      static_cast<char*>(p.mailboxes[owner]) + slot_offset(block_index(), set, from, p.peers.size);
  return unit_at<U>(slot, at);
}

/// One unit of this rank's input into its slot in every mailbox.
template <typename U>
FARANDOLE_DEVICE void hand_over(const OneShot& p, uint32_t set, uint32_t in_slot, const U& unit) {
  for (uint32_t i = 1; i <= p.peers.size; ++i) {  // each begins with another peer
    const uint32_t owner = (p.peers.rank + i) % p.peers.size;
    store_peer(slot_unit<U>(p, owner, set, p.peers.rank, in_slot), unit);
  }
}

/// The same unit of all inputs, in this rank's own mailbox.
template <typename U>
struct LeavesInSlots {
  const OneShot& p;
  uint32_t set, in_slot;

  FARANDOLE_DEVICE U read(uint32_t from) const {
    return load_peer(slot_unit<U>(p, p.peers.rank, set, from, in_slot));
  }
  FARANDOLE_DEVICE const Scaling& scaling() const { return p.leaf; }
};

template <typename U, bool adds>
FARANDOLE_DEVICE U take_in(const OneShot& p, uint32_t set, uint32_t in_slot) {
  return fold_leaves<U, adds>(p.formula, p.peers.size, LeavesInSlots<U>{p, set, in_slot});
}

/// In rounds; in each, every block hands over one slot. Packs as slots have them: whole ones, and
/// behind them the last elements one by one. `aligned`: the user's memory allows packs, too.
template <typename E, typename Read, typename Write>
FARANDOLE_DEVICE void for_slot(uint64_t count, bool aligned, Read read, Write write) {
  constexpr uint32_t n = kPerPack<E>;
  for_units<1, n>(count, cut(count, 0, 1, n, aligned), turns_of_block(), read, write);
}

template <typename E, bool adds>
FARANDOLE_DEVICE void take_in_slot(const OneShot& p, uint32_t set, uint64_t first, uint64_t count) {
  for_slot<E>(
      count, offset_in_pack(p.output) == 0,
      [&]<uint32_t n>(Elements<n>, uint64_t at) {
        return take_in<Unit<E, n>, adds>(p, set, static_cast<uint32_t>(at));
      },
      [&]<uint32_t n>(Elements<n>, uint64_t at, const Unit<E, n>& folded) {
        store(unit_at<Unit<E, n>>(p.output, first + at), scale_unit(folded, p.finish));
      });
}

/// A set is written again two meetings later. Its writer has met everybody in between, and a
/// rank comes to a meeting when it has done with what it read before: two sets are enough, and the
/// kernel ends without waiting for those who still read.
template <typename E>
FARANDOLE_DEVICE void hand_over_and_fold(const OneShot& p) {
  constexpr uint64_t kSlot = kSlotBytes / sizeof(BitsOfElement<E>);
  for (uint64_t first = block_index() * kSlot; first < p.count; first += block_count() * kSlot) {
    const uint64_t rest = p.count - first, count = rest < kSlot ? rest : kSlot;
    const uint32_t set = next_epoch(p.peers, block_index()) % 2;
    for_slot<E>(
        count, offset_in_pack(p.input) == 0,
        [&]<uint32_t n>(Elements<n>, uint64_t at) {
          return load(unit_at<Unit<E, n>>(p.input, first + at));
        },
        [&]<uint32_t n>(Elements<n>, uint64_t at, const Unit<E, n>& unit) {
          hand_over(p, set, static_cast<uint32_t>(at), unit);
        });
    if (!meet(p.peers)) return;
    if (p.formula == Formula::add)
      take_in_slot<E, true>(p, set, first, count);
    else
      take_in_slot<E, false>(p, set, first, count);
  }
}

/// The last block's first thread says it, behind what all others have written: the barrier and the
/// count hand that on. A stream would take as long again to write a word behind the kernel.
FARANDOLE_DEVICE void tell_end(const OneShot& p) {
  if (p.done == nullptr) return;
  block_barrier();
  if (thread_index() != 0) return;
  if (block_count() > 1) {
    uint32_t& ended = own_flags(p.peers).ended;
    if (atomic_add(&ended, 1) + 1 < block_count()) return;
    store(&ended, uint32_t{0});
  }
  store_release(p.done, p.number);
}

template <typename E>
FARANDOLE_DEVICE void one_shot(const OneShot& p) {
  hand_over_and_fold<E>(p);
  tell_end(p);
}

}  // namespace farandole::cuda
