// The parameters of kernels: one plain struct each, passed by value. Host and device lay them out
// alike, and no header of CUDA is needed to fill one. plans.h fills them for each collective.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/formula.h"
#include "base/update_factors.h"

namespace farandole::cuda {

/// Threads of a block. Kernels are right with any number, and compiled for this one.
inline constexpr uint32_t kThreads = 256;

/// So many blocks of any kernel are resident on a multiprocessor.
inline constexpr uint32_t kResidentBlocks = 2;

/// So many of kernels with these parameters: registers are bounded by it. Those that move most have
/// more threads, since what these have under way is what memory is kept busy by.
template <typename Parameters>
inline constexpr uint32_t kFittingBlocks = kResidentBlocks;

/// The most ranks of one exchange. Three pointers for each leave room in a launch's parameters.
inline constexpr uint32_t kMostRanks = 64;

/// A channel is block b of every rank: those meet each other and no other blocks. So an exchange
/// has at most so many blocks, and equally many on every rank.
inline constexpr uint32_t kMostChannels = 64;

/// Bytes that one block hands over in one round of a one-shot: 16 for every thread.
inline constexpr uint32_t kSlotBytes = 16 * kThreads;

/// fold/fold.h's Scale with the factor in both accumulate types, each converted once.
struct Scaling {
  double float64 = 1;
  float float32 = 1;
  uint32_t applies = 0;  // 0: elements are copied as they are
  int64_t divide = 1;    // integers only
};

/// Where ranks meet: one in the memory of each, mapped by all and zero at first. Words only grow
/// (modulo 2^32), but for `ended` and those of graphs (GraphMeet). One operation at a time uses it:
/// operations in two streams have two.
struct Flags {
  uint32_t epoch[kMostChannels];                // how often channel c has met; its owner's own
  uint32_t arrived[kMostChannels][kMostRanks];  // which meeting rank r's block has come to
  uint32_t ended;                               // blocks of its owner's one-shot that runs
};

/// The ranks of an exchange. `abort` is one word of pinned host memory: as soon as it is not zero,
/// every kernel ends, and what it leaves behind means nothing.
struct Peers {
  uint32_t rank = 0, size = 1;
  const uint32_t* abort = nullptr;
  Flags* flags[kMostRanks] = {};  // as mapped here; flags[rank] is this rank's own
};

/// farandole_fold_<dtype>: destinations[…][i] = the canonical fold of sources[…][i], scaled:
/// docs/determinism.md. Sources are ready, and nobody else touches destinations meanwhile.
/// Destinations may be sources. Alignment of elements is enough; where all arrays lie alike modulo
/// 16 bytes, accesses have 16 bytes.
struct Fold {
  uint64_t count = 0;  // elements
  uint32_t source_count = 0, destination_count = 0;
  Formula formula = Formula::add;
  Scaling leaf, finish;  // of every source, and of the result
  const void* sources[kMostRanks] = {};
  void* destinations[kMostRanks] = {};
};

template <>
inline constexpr uint32_t kFittingBlocks<Fold> = 4;

/// farandole_one_shot_<dtype>: an all-reduce in which every rank hands its input to all and folds
/// alone. Input and output may be any memory of this device, and the same. NEEDS ALL RANKS' KERNELS
/// RESIDENT AT ONCE.
struct OneShot {
  Peers peers;
  uint64_t count = 0;
  Formula formula = Formula::add;
  Scaling leaf, finish;
  const void* input = nullptr;
  void* output = nullptr;
  void* mailboxes[kMostRanks] = {};  // mailbox_bytes(size) each, aligned to 16, as mapped here
  uint32_t* done = nullptr;          // a word that becomes `number` when it has ended; or null
  uint32_t number = 0;
};

/// In a mailbox: for every channel two sets of slots, used in turn; in a set a slot for every rank.
constexpr uint64_t slot_offset(uint32_t channel, uint32_t set, uint32_t from, uint32_t size) {
  return ((uint64_t{channel} * 2 + set) * size + from) * kSlotBytes;
}
constexpr uint64_t mailbox_bytes(uint32_t size) { return slot_offset(kMostChannels, 0, 0, size); }

/// Where lanes count what they have handed to each other: one in the memory of each rank, mapped by
/// all and zero at first. By lane and peer; words only grow. Slots are numbered, and slot n lies in
/// place n % 2 of the mailbox.
struct LaneFlags {
  uint32_t filled[kMostChannels][kMostRanks];   // by the peer, of this rank's mailbox
  uint32_t emptied[kMostChannels][kMostRanks];  // by the peer, of its own, which this rank fills
  uint32_t sent[kMostChannels][kMostRanks];     // the owner's own counts
  uint32_t taken[kMostChannels][kMostRanks];
};

/// A step of schedule/schedule.h. Spaces are 0 to 2: input, output, scratch; offsets and counts are
/// in elements.
struct LaneStep {
  int32_t to = -1, from = -1;
  uint8_t send_space = 0, recv_space = 0, held_space = 0, action = 0;
  uint8_t leaf_arrived = 0, leaf_held = 0, finish = 0;
  uint64_t send_offset = 0, send_count = 0, recv_offset = 0, recv_count = 0, held_offset = 0;
};

/// farandole_lanes_<dtype>: block b runs lane b of a schedule, the same as on the host. Tables lie
/// in device memory: lane b has the steps from first[b] to first[b + 1]. All ranks have as many
/// blocks. They meet first, so mailboxes may be memory that had another use before. NEEDS ALL
/// RANKS' KERNELS RESIDENT AT ONCE.
struct Lanes {
  Peers peers;
  Formula formula = Formula::add;
  uint32_t slot_bytes = 0;  // a multiple of 16
  const LaneStep* steps = nullptr;
  const uint32_t* first = nullptr;
  void* spaces[3] = {};
  Scaling leaf, finish;
  LaneFlags* flags[kMostRanks] = {};  // as mapped here
  void* mailboxes[kMostRanks] = {};   // lane_mailbox_bytes() each, aligned to 16, as mapped here
};

constexpr uint64_t lane_slot_offset(uint32_t lane, uint32_t place, uint32_t from, uint32_t size,
                                    uint32_t slot_bytes) {
  return ((uint64_t{lane} * 2 + place) * size + from) * slot_bytes;
}
constexpr uint64_t lane_mailbox_bytes(uint32_t lanes, uint32_t size, uint32_t slot_bytes) {
  return lane_slot_offset(lanes, 0, 0, size, slot_bytes);
}

/// farandole_arrive and farandole_await: the two halves of a meeting in one channel, for exchanges
/// whose steps are ordered by streams. arrive waits for nobody. await spins until all have arrived;
/// where ranks share a device, cuStreamWaitValue32 on arrived[channel][…] takes its place.
/// One block.
struct Meet {
  Peers peers;
  uint32_t channel = 0;
};

/// How a rank's captured collectives come along, in its device's memory. Counts are modulo 2^32.
struct GraphCounts {
  uint32_t begun = 0, ended = 0;  // as often as any of them was replayed
  uint32_t given_up = 0;          // not 0: nobody waits any more
};
/// The same in pinned memory, which the rank's host reads.
struct GraphWords {
  uint32_t begun = 0, ended = 0;
  uint32_t at = 0;                   // the tag of the one that has begun last
  uint32_t wrong = 0;                // not 0: one of the following says what is
  uint32_t overlaps = 0;             // the tag of one that began before another had ended
  uint32_t own[kMostRanks] = {};     // where rank r came with another tag: this rank's,
  uint32_t theirs[kMostRanks] = {};  // and r's; 0: it did not
};

/// The value of flags once a rank has given up: it passes for every tag, and stays.
inline constexpr uint32_t kPassesAll = ~uint32_t{0};
/// The tag of the captured collective with this number, which is the same on all ranks. Odd, since
/// streams wait for that bit. Never kPassesAll.
constexpr uint32_t graph_tag(uint32_t number) { return (number << 1 | 1) & (kPassesAll >> 1); }
constexpr uint32_t number_of_tag(uint32_t tag) { return tag >> 1; }

/// farandole_graph_arrive and farandole_graph_pass: the two halves of a meeting inside CUDA graphs,
/// which are replayed as they were captured: so flags take tags, not counts, and a rank that passes
/// sets them back. Between the two the stream waits for bit 0 of all arrived[channel][…]. A
/// collective meets in two channels by turns: a rank comes to the one again when the others have
/// passed it, since they have come to the other one. A rank whose graph has another collective here
/// is noticed by its tag. One block.
struct GraphMeet {
  Peers peers;
  uint32_t channel = 0;
  uint32_t tag = 0;
  const GraphCounts* counts = nullptr;
  GraphWords* words = nullptr;
};

/// farandole_graph_begin and farandole_graph_end: around all that a collective does in a graph. One
/// thread.
struct GraphCollective {
  uint32_t tag = 0;
  GraphCounts* counts = nullptr;  // of several streams at once, if need be
  GraphWords* words = nullptr;
};

/// A stretch of a bucket and the tensor that it belongs to. The table lies in device memory.
struct Piece {
  const void* from = nullptr;
  void* to = nullptr;
  uint64_t count = 0;        // elements
  uint64_t first_chunk = 0;  // chunks of all pieces before this one
};

/// Elements that one block takes at a time. A piece has its own chunks, the last one is shorter.
inline constexpr uint64_t kChunkElements = 4096;
constexpr uint64_t chunks_of(uint64_t count) {
  return (count + kChunkElements - 1) / kChunkElements;
}

/// farandole_copy_<dtype>: from tensors to a bucket, or back, scaled. Pieces with no elements are
/// not in the table.
struct Pieces {
  const Piece* pieces = nullptr;
  uint32_t piece_count = 0;
  uint64_t chunks = 0;  // of all pieces
  Scaling scaling;
};
template <>
inline constexpr uint32_t kFittingBlocks<Pieces> = 4;

/// The update of a stretch of one parameter. No two of the arrays overlap, but `shared` may be the
/// gradient.
struct UpdatePiece {
  void* value = nullptr;
  void* shared = nullptr;          // where other ranks read the new values
  const void* gradient = nullptr;  // reduced
  void* state[kMostSlots] = {};    // slots_of(kind) of them
  uint64_t count = 0;              // elements
  uint64_t first_chunk = 0;        // chunks of all pieces before this one
  UpdateKind kind = UpdateKind::sgd;
  uint8_t unused[7] = {};  // as in UpdateFactors
  UpdateFactors factors;
};
static_assert(sizeof(UpdatePiece) == 7 * sizeof(uint64_t) + 8 + sizeof(UpdateFactors));

/// A launch takes 4096 bytes of parameters.
inline constexpr uint32_t kMostUpdates = 16;

/// farandole_update_<dtype>: the optimizer's step (fold/update.h), of float32 and float64. Pieces
/// with no elements are not among them.
struct Updates {
  uint64_t piece_count = 0;
  uint64_t chunks = 0;  // of all pieces
  UpdatePiece pieces[kMostUpdates];
};
template <>
inline constexpr uint32_t kFittingBlocks<Updates> = 3;
static_assert(sizeof(Updates) <= 4096);

/// A stretch of one parameter, of which a norm is taken.
struct NormPiece {
  const void* gradient = nullptr;  // reduced
  uint64_t count = 0;              // elements
  uint64_t begin = 0;              // elements of its first tile that are before it
  uint64_t first_chunk = 0;        // terms of all pieces before this one
};

inline constexpr uint32_t kMostNormPieces = 96;

/// farandole_norms_<dtype>: a term for each tile of each piece (norm.cuh), of float32 and float64.
struct Norms {
  uint64_t piece_count = 0;
  uint64_t terms = 0;    // of all pieces
  uint64_t tile = 0;     // elements
  uint64_t largest = 0;  // not 0: magnitudes, in place of sums of squares
  double* made = nullptr;
  double* scratch = nullptr;  // norm_scratch(blocks, threads) numbers
  NormPiece pieces[kMostNormPieces];
};
static_assert(sizeof(Norms) <= 4096);

constexpr uint64_t norm_scratch(uint32_t blocks, uint32_t threads) {
  return uint64_t{blocks} * (threads > kNormLanes ? threads : kNormLanes);
}

}  // namespace farandole::cuda
