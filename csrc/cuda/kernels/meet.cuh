// How ranks meet: block b of every rank with block b of the others, in channel b.
//
// A rank arrives by writing the meeting's number into every peer's flags, and has met the others
// when all their numbers stand in its own. Numbers only grow, so nothing is ever reset (but what
// graph.cuh has), and a rank that is late finds everything that it missed.
#pragma once

#include "cuda/kernels/device.h"
#include "cuda/kernels/parameters.h"

namespace farandole::cuda {

FARANDOLE_DEVICE Flags& own_flags(const Peers& peers) { return *peers.flags[peers.rank]; }

/// The number of the next meeting in `channel`. All threads of the block.
FARANDOLE_DEVICE uint32_t next_epoch(const Peers& peers, uint32_t channel) {
  return load(&own_flags(peers).epoch[channel]) + 1;
}

/// Accesses of all threads of this block come before those of peers after the meeting: the barrier
/// hands them to the threads that release.
FARANDOLE_DEVICE void arrive(const Peers& peers, uint32_t channel, uint32_t epoch) {
  block_barrier();
  for (uint32_t r = thread_index(); r < peers.size; r += thread_count())
    if (r != peers.rank) store_release(&peers.flags[r]->arrived[channel][peers.rank], epoch);
  if (thread_index() == 0) store(&own_flags(peers).epoch[channel], epoch);
}

/// Whether all have arrived; not if the group has failed. The barrier hands on what was acquired.
FARANDOLE_DEVICE bool await(const Peers& peers, uint32_t channel, uint32_t epoch) {
  bool met = true;
  for (uint32_t r = thread_index(); r < peers.size && met; r += thread_count())
    if (r != peers.rank) met = wait_for(&own_flags(peers).arrived[channel][r], epoch, peers.abort);
  return block_all(met);
}

/// Nobody goes on before all have come. False when the group has failed: the kernel ends.
FARANDOLE_DEVICE bool meet(const Peers& peers) {
  const uint32_t channel = block_index(), epoch = next_epoch(peers, channel);
  arrive(peers, channel, epoch);
  return await(peers, channel, epoch);
}

/// farandole_arrive: one block, which waits for nobody.
FARANDOLE_DEVICE void arrive(const Meet& at) {
  arrive(at.peers, at.channel, next_epoch(at.peers, at.channel));
}

/// farandole_await: one block, behind farandole_arrive in its stream.
FARANDOLE_DEVICE void await(const Meet& at) {
  await(at.peers, at.channel, next_epoch(at.peers, at.channel) - 1);
}

}  // namespace farandole::cuda
