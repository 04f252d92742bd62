// How ranks meet inside CUDA graphs (GraphMeet in parameters.h): nobody is at the host who could
// count meetings, so a collective has its tag, and flags go back to 0.
#pragma once

#include "cuda/kernels/meet.cuh"

namespace farandole::cuda {

/// farandole_graph_begin. Two graphs that run at once would meet in the same flags, and use the
/// same bucket.
FARANDOLE_DEVICE void graph_begin(const GraphCollective& at) {
  const uint32_t before = atomic_add(&at.counts->begun, 1);
  if (before != load_acquire(&at.counts->ended)) {
    store_release(&at.words->overlaps, at.tag);
    store_release(&at.words->wrong, 1);
  }
  store_release(&at.words->at, at.tag);
  store_release(&at.words->begun, before + 1);
}

/// farandole_graph_end.
FARANDOLE_DEVICE void graph_end(const GraphCollective& at) {
  store_release(&at.words->ended, atomic_add(&at.counts->ended, 1) + 1);
}

/// farandole_graph_arrive: waits for nobody.
FARANDOLE_DEVICE void graph_arrive(const GraphMeet& at) {
  const Peers& peers = at.peers;
  block_barrier();
  for (uint32_t r = thread_index(); r < peers.size; r += thread_count())
    if (r != peers.rank) store_release(&peers.flags[r]->arrived[at.channel][peers.rank], at.tag);
}

/// farandole_graph_pass: behind the waits of its stream.
FARANDOLE_DEVICE void graph_pass(const GraphMeet& at) {
  const Peers& peers = at.peers;
  const uint32_t left = load_acquire(&at.counts->given_up) != 0 ? kPassesAll : 0;
  for (uint32_t r = thread_index(); r < peers.size; r += thread_count()) {
    if (r == peers.rank) continue;
    uint32_t* const word = &own_flags(peers).arrived[at.channel][r];
    const uint32_t found = load_acquire(word);
    if (found == kPassesAll) continue;
    if (found != at.tag && found != 0) {  // 0: two graphs run at once
      store_release(&at.words->own[r], at.tag);
      store_release(&at.words->theirs[r], found);
      store_release(&at.words->wrong, 1);
    }
    store_release(word, left);
  }
}

}  // namespace farandole::cuda
