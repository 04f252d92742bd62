// The kernels' parameters for each collective, as values: arguments in, structs of
// kernels/parameters.h out. Nothing here needs a device.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "cuda/kernels/parameters.h"
#include "fold/fold.h"
#include "schedule/schedule.h"

namespace farandole::cuda {

using Inputs = std::span<const void* const>;  // of every rank, as mapped here
using Outputs = std::span<void* const>;

/// How elements are folded: the same on all ranks.
struct Folding {
  DType dtype;
  ReduceOp op = ReduceOp::sum;
  Scales scales{};
};

Scaling scaling_of(const Scale& scale);

/// Elements [first, first + count) of all sources, to all destinations. `sources` and
/// `destinations` are where the arrays begin.
Fold fold_of(Inputs sources, Outputs destinations, size_t first, size_t count,
             const Folding& folding);

OneShot all_reduce_in_one(const Peers& peers, const void* input, void* output, Outputs mailboxes,
                          size_t count, const Folding& folding);

/// Kernels of one dtype: "farandole_fold_float16".
std::string kernel_name(std::string_view what, DType dtype);
/// Fills first_chunk of each piece and makes the parameters of their copy. Every piece has
/// elements. `table`: where the pieces will lie on the device.
Pieces pieces_of(std::span<Piece> pieces, const Piece* table, const Scale& scale);

/// The same of an update: kMostUpdates at most.
Updates updates_of(std::span<const UpdatePiece> pieces);

/// The same of a norm: kMostNormPieces at most, to `made`.
Norms norms_of(std::span<const NormPiece> pieces, uint64_t tile, bool largest, double* made,
               double* scratch);

/// A schedule as farandole_lanes_<dtype> takes it: one block for each of `lanes`, which are at most
/// kMostChannels. Those that this rank's schedule does not have are empty: all ranks have as many.
struct LaneTable {
  std::vector<LaneStep> steps;
  std::vector<uint32_t> first;  // lanes + 1
  uint64_t scratch = 0;         // elements

  uint32_t lanes() const { return static_cast<uint32_t>(first.size()) - 1; }
};
LaneTable lanes_of(const Schedule& schedule, int lanes);

inline constexpr uint32_t kMostLanes = 32, kMostSegments = 8;  // that schedules may have

/// The key of a schedule, of which each rank plans its own. Elements left beside whole grains have
/// a schedule by themselves, in the last lane.
struct LanesAsked {
  std::string planner;
  Collective kind{};
  size_t count = 0;
  std::vector<size_t> counts{};
  int root = 0, lanes = 1, segments = 1;
  uint32_t grain = 1;  // elements that stay together, of a collective on the whole: a pack's

  bool operator==(const LanesAsked&) const = default;
};
LaneTable lanes_of(const LanesAsked& asked, uint32_t rank, uint32_t size);
/// Bytes of the longest table, of a rank of so many; a power of two.
size_t longest_lane_table(uint32_t size);

// Grid sizes.

/// The resources of the least of the ranks' devices, since all ranks' grids are equal.
struct Room {
  uint32_t processors = 1;       // multiprocessors, of this partition under MIG or MPS
  uint32_t ranks_on_device = 1;  // that share them
  uint64_t link_blocks = 0;      // at most, of Work::links; 0: as many as links need
};

enum class Work : uint8_t {
  alone,     // fold: blocks that wait for nobody
  links,     // fold: the same, but what they read comes over links
  lasting,   // norms: the same, but each has memory of its own
  exchange,  // lanes: blocks that wait for other ranks'
  slots,     // one_shot: the same, and one slot per block and round
};

/// The most blocks of Work::lasting.
uint32_t most_lasting_blocks(uint32_t processors);
/// Blocks of Work::alone for so many chunks: copies, updates.
uint32_t blocks_for_chunks(uint64_t chunks, uint32_t processors);
/// Blocks of kThreads for `bytes`, of the longest input or, of Work::exchange, of what one rank
/// reads of each.
uint32_t blocks_for(Work work, uint64_t bytes, const Room& room);

/// How lanes use `bytes` of memory that each rank has, of which it hands `shared` to the others at
/// most: a piece lies at the begin and scratch for it behind that, slots are the last.
struct LaneRoom {
  uint32_t lanes = 0;        // at most; 0: there is no room
  uint64_t piece_bytes = 0;  // a multiple of 128: no piece begins within a pack
  uint64_t scratch_bytes = 0;
  uint64_t mailbox_bytes = 0;

  /// The bytes of each slot, where so many lanes share the mailbox.
  uint32_t slot_bytes(uint32_t of_lanes, uint32_t size) const;
};
LaneRoom lane_room(uint64_t bytes, uint64_t shared, uint32_t size, const Room& room);

}  // namespace farandole::cuda
