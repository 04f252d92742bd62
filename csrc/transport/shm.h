// Channels between processes of one host, through the segment that all of them map.
//
// Each side allocates from its own arena one block of transmit rings for (stream, peer), publishes
// it in the segment's directory, and polls the peer's directory for the counterpart. Long runs of
// bytes that lie in the arenas anyway travel as references: the reader folds straight out of the
// writer's memory.
//
// Nothing here rings a doorbell: the engine rings, at the end of a turn, the peers that sleep.
#pragma once

#include <memory>
#include <string>

#include "transport/segment.h"
#include "transport/transport.h"

namespace farandole {

/// Bytes that a ring holds. Sparse: an idle ring costs address space only. So long that its lines
/// have left the reader's caches when they are written again: an all-reduce of 4 MiB by `ring`, Zen
/// 4: with 128 KiB 590 us, 256: 350, 512: 320, 1 MiB: 330.
inline constexpr size_t kShmRingBytes = 512 * 1024;

/// The transport of `rank` (its place in the segment), which reaches the ranks of the same `host`.
/// Its channels may outlive it; a block is given back to `arena` when both sides have closed it.
std::unique_ptr<Transport> shm_transport(std::shared_ptr<Arena> arena, int rank, std::string host);

}  // namespace farandole
