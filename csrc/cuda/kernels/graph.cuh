// How ranks meet inside CUDA graphs (GraphMeet in parameters.h): nobody is at the host who could
// count meetings, so a collective has its tag, and flags go back to 0.
#pragma once

#include "cuda/kernels/meet.cuh"

namespace farandole::cuda {

/// Two graphs that run at once would meet in the same flags, and use the same bucket.
FARANDOLE_DEVICE void note_begin(const GraphMeet& at) {
  const uint32_t begun = load_acquire(&at.words->begun);
  if (begun != load_acquire(&at.words->ended)) store_release(&at.words->overlaps, at.tag);
  store_release(&at.words->at, at.tag);
  store_release(&at.words->begun, begun + 1);
}

/// farandole_graph_arrive: waits for nobody.
FARANDOLE_DEVICE void graph_arrive(const GraphMeet& at) {
  const Peers& peers = at.peers;
  if (at.begins != 0 && thread_index() == 0) note_begin(at);
  block_barrier();
  for (uint32_t r = thread_index(); r < peers.size; r += thread_count())
    if (r != peers.rank) store_release(&peers.flags[r]->arrived[at.channel][peers.rank], at.tag);
}

/// farandole_graph_pass: behind the waits of its stream.
FARANDOLE_DEVICE void graph_pass(const GraphMeet& at) {
  const Peers& peers = at.peers;
  for (uint32_t r = thread_index(); r < peers.size; r += thread_count()) {
    if (r == peers.rank) continue;
    uint32_t* const word = &own_flags(peers).arrived[at.channel][r];
    const uint32_t found = load_acquire(word);
    if (found == kPassesAll) continue;
    if (found != at.tag) {
      store_release(&at.words->own[r], at.tag);
      store_release(&at.words->theirs[r], found);
    }
    store_release(word, 0);
  }
  block_barrier();
  if (at.ends != 0 && thread_index() == 0)
    store_release(&at.words->ended, load_acquire(&at.words->begun));
}

}  // namespace farandole::cuda
