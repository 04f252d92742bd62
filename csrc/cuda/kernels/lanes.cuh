// Schedules on the device: every block runs one lane, step by step. What a step sends goes through
// slots in the receiver's mailbox, two for each lane and pair of ranks, which the sender fills and
// the receiver empties. Blocks of a lane meet before the first step: a receiver has done by then
// with what else its mailbox was used for.
//
// A step sends and receives by turns, whatever can be done now: two ranks that send to each other
// more than fits the slots do not wait for each other.
#pragma once

#include "cuda/kernels/fold.cuh"
#include "cuda/kernels/meet.cuh"

namespace farandole::cuda {

enum class LaneAction : uint8_t { store, fold_upper, fold_lower };

/// A step's part in elements that have arrived: recv = arrived, folded with held.
struct Arrival {
  const void* arrived;
  const void* held;
  void* recv;
  uint64_t count;
};

template <typename U, bool adds>
FARANDOLE_DEVICE U arrived_at(const Lanes& p, const LaneStep& step, const Arrival& part,
                              uint64_t at) {
  const auto action = static_cast<LaneAction>(step.action);
  U result = load_peer(unit_at<U>(part.arrived, at));
  if (step.leaf_arrived != 0) result = scale_unit(result, p.leaf);
  if (action != LaneAction::store) {
    U held = load_peer(unit_at<U>(part.held, at));
    if (step.leaf_held != 0) held = scale_unit(held, p.leaf);
    const bool upper = action == LaneAction::fold_upper;
    result = fold_two<U, adds>(p.formula, upper ? held : result, upper ? result : held);
  }
  return step.finish != 0 ? scale_unit(result, p.finish) : result;
}

/// By all threads of the block.
template <typename E, bool adds>
FARANDOLE_DEVICE void take(const Lanes& p, const LaneStep& step, const Arrival& part) {
  const uint32_t offset = offset_in_pack(part.recv);
  const bool alike = offset_in_pack(part.arrived) == offset &&
                     (step.action == 0 || offset_in_pack(part.held) == offset);
  const Cut by = cut(part.count, offset, sizeof(BitsOfElement<E>), kPerPack<E>, alike);
  for_units<1, kPerPack<E>>(
      part.count, by, Turns<uint64_t>{thread_index(), thread_count()},
      [&]<uint32_t n>(Elements<n>, uint64_t at) {
        return arrived_at<Unit<E, n>, adds>(p, step, part, at);
      },
      [&]<uint32_t n>(Elements<n>, uint64_t at, const Unit<E, n>& result) {
        store_peer(unit_at<Unit<E, n>>(part.recv, at), result);
      });
}

/// The largest slot is as many packs for each of kThreads.
inline constexpr uint32_t kFillsTogether = 4;

template <typename E>
FARANDOLE_DEVICE void fill(const void* from, void* slot, uint64_t count) {
  const Cut by = cut(count, 0, 1, kPerPack<E>, offset_in_pack(from) == 0);
  for_units<kFillsTogether, kPerPack<E>>(
      count, by, turns_of_block(),
      [&]<uint32_t n>(Elements<n>, uint64_t at) {
        return load_peer(unit_at<Unit<E, n>>(from, at));
      },
      [&]<uint32_t n>(Elements<n>, uint64_t at, const Unit<E, n>& unit) {
        store_peer(unit_at<Unit<E, n>>(slot, at), unit);
      });
}

/// One lane, as its block sees it.
template <typename E, bool adds>
struct LaneRun {
  const Lanes& p;
  const uint32_t lane;

  static constexpr uint32_t kSend = 1, kTake = 2;

  FARANDOLE_DEVICE LaneFlags& own() const { return *p.flags[p.peers.rank]; }
  FARANDOLE_DEVICE void* place(uint8_t space, uint64_t offset) const {
    return unit_at<One<E>>(p.spaces[space], offset);
  }
  FARANDOLE_DEVICE char* slot(uint32_t owner, uint32_t from, uint32_t number) const {
    return static_cast<char*>(p.mailboxes[owner]) +
           lane_slot_offset(lane, number % 2, from, p.peers.size, p.slot_bytes);
  }

  /// Thread 0 waits until it may send or take; 0 when the group has failed. Then all know.
  FARANDOLE_DEVICE uint32_t wait(const LaneStep& step, bool sends, bool takes, uint32_t sent,
                                 uint32_t taken) const {
    uint32_t can = 0;
    for (uint32_t turn = 1; thread_index() == 0; ++turn) {
      if (sends && sent - load_acquire(&own().emptied[lane][step.to]) < 2) can |= kSend;
      if (takes && load_acquire(&own().filled[lane][step.from]) != taken) can |= kTake;
      if (can != 0) break;
      if (turn % kTurnsBetweenLooks == 0 && load_acquire(p.peers.abort) != 0) break;
      relax(turn);
    }
    return block_broadcast(can);
  }

  /// The block's work comes before the word: the barrier hands it to thread 0, which writes.
  FARANDOLE_DEVICE void publish(uint32_t* word, uint32_t* count, uint32_t value) const {
    block_barrier();
    if (thread_index() != 0) return;
    store(count, value);
    store_release(word, value);
  }

  FARANDOLE_DEVICE bool exchange(const LaneStep& step) const {
    const uint64_t most = p.slot_bytes / sizeof(BitsOfElement<E>);
    const uint32_t to = step.send_count > 0 ? step.to : 0,
                   from = step.recv_count > 0 ? step.from : 0;
    block_barrier();  // thread 0 has written the counts of the step before
    uint32_t sent = load(&own().sent[lane][to]), taken = load(&own().taken[lane][from]);
    block_barrier();  // all have read the counts before one of them changes
    for (uint64_t out = 0, in = 0; out < step.send_count || in < step.recv_count;) {
      const bool sends = out < step.send_count, takes = in < step.recv_count;
      const uint32_t can = wait(step, sends, takes, sent, taken);
      if (can == 0) return false;
      if ((can & kSend) != 0) {
        const uint64_t rest = step.send_count - out, count = rest < most ? rest : most;
        fill<E>(place(step.send_space, step.send_offset + out), slot(to, p.peers.rank, sent),
                count);
        publish(&p.flags[to]->filled[lane][p.peers.rank], &own().sent[lane][to], ++sent);
        out += count;
      }
      if ((can & kTake) != 0) {
        const uint64_t rest = step.recv_count - in, count = rest < most ? rest : most;
        take<E, adds>(
            p, step,
            {slot(p.peers.rank, from, taken), place(step.held_space, step.held_offset + in),
             place(step.recv_space, step.recv_offset + in), count});
        publish(&p.flags[from]->emptied[lane][p.peers.rank], &own().taken[lane][from], ++taken);
        in += count;
      }
    }
    return true;
  }

  /// A step within the rank: what it sends is what arrives.
  FARANDOLE_DEVICE void locally(const LaneStep& step) const {
    take<E, adds>(
        p, step,
        {place(step.send_space, step.send_offset), place(step.held_space, step.held_offset),
         place(step.recv_space, step.recv_offset), step.recv_count});
    block_barrier();
  }

  FARANDOLE_DEVICE void run() const {
    for (uint32_t s = p.first[lane]; s < p.first[lane + 1]; ++s) {
      const LaneStep& step = p.steps[s];
      if (step.to == static_cast<int32_t>(p.peers.rank))
        locally(step);
      else if (!exchange(step))
        return;
    }
  }
};

template <typename E>
FARANDOLE_DEVICE void lanes(const Lanes& p) {
  if (!meet(p.peers)) return;
  if (p.formula == Formula::add)
    LaneRun<E, true>{p, block_index()}.run();
  else
    LaneRun<E, false>{p, block_index()}.run();
}

}  // namespace farandole::cuda
