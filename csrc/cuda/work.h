// What an exchange between devices is asked to do, and what it answers: plain values, which know no
// driver.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/update_factors.h"
#include "cuda/plans.h"

namespace farandole {

/// When arrays were ready, when the device began, and when it was done: by the host's monotonic
/// clock, in nanoseconds.
struct CudaTimes {
  int64_t ready, begun, complete;
};

struct CudaExchangeShape {
  int32_t device, rank, size;
  int32_t doorbell;       // an event descriptor, rung when an operation is complete
  bool spins;             // there is to be room for what spin() and run_lanes() need
  bool captured;          // all its operations become parts of graphs: CapturedSteps
  uint64_t link_blocks;   // the most of a fold over links; 0: as many as those need
  uint64_t bucket_bytes;  // the most of one piece: the bucket has room for kCudaStrands pieces, or
                          // for one where it is captured
};
/// Pieces that can be under way at once.
inline constexpr int32_t kCudaStrands = 2;

/// A copy from the input to this rank's bucket, or from `rank`'s bucket to the output. Offsets.
struct CudaMove {
  uint64_t from, to, bytes;
  int32_t rank;
};

/// Where the result of a fold goes. A number from 0 on is a rank, to whose bucket it goes, at the
/// same offset.
enum CudaFoldsTo : int32_t { kFoldsToOutput = -2, kFoldsToAllBuckets = -1 };

/// The update of one stretch of a parameter once its gradients are folded. They stand at `gradient`
/// in this rank's bucket; the new values replace them there, and go to the others' buckets.
struct CudaUpdate {
  uint64_t value, gradient, count;  // an address, an offset, elements
  uint64_t state[kMostSlots];       // addresses
  UpdateKind kind;
  UpdateFactors factors;
};

/// A stretch of one parameter whose gradients were folded to this rank's bucket, for a norm.
struct CudaNormStretch {
  uint64_t gradient, count;  // an offset, elements
  uint64_t begin;            // elements of its first tile that are before it
  uint64_t first_term;
};

/// A part of a collective: move in, meet, fold, move out, and meet again, before the last move
/// where that needs what others have folded.
struct CudaPiece {
  int32_t strand = 0;
  uint64_t input = 0, output = 0;  // addresses
  std::span<const CudaMove> in{}, out{};
  // The fold of elements [first, first + count) of all buckets; of none where count is 0.
  uint64_t first = 0, count = 0;
  int32_t folds_to = kFoldsToOutput;
  uint64_t fold_to = 0;  // an address in the output
  // Where this rank's part of what is folded lies instead of in its bucket; 0: there.
  uint64_t own_from = 0, own_to = 0;
  cuda::Folding folding{.dtype = DType::uint8};
  std::span<const CudaUpdate> updates{};     // of what was folded to this rank's own bucket
  std::span<const CudaNormStretch> norms{};  // likewise, in place of updates
  uint64_t norm_terms = 0;    // the address of all terms, of doubles: one for each tile
  uint64_t norm_tile = 0;     // elements
  bool norm_largest = false;  // magnitudes, in place of sums of squares
};

/// The state of collectives in graphs, which are named by the numbers given to
/// CapturedSteps::begin().
struct CudaGraphState {
  uint32_t begun, ended;  // replays of any of them, modulo 2^32
  uint32_t at;            // which has begun last
  bool overlaps;          // it began before another had ended
  int32_t differs;        // a rank that was at another one when this rank was at `own`; -1: none
  uint32_t own, theirs;
};

/// The id by which ranks find each other in NCCL: one rank makes it, all receive it.
struct CudaNcclId {
  char bytes[128];
};

enum CudaNcclWhat : int32_t {
  kNcclAllReduce,
  kNcclReduceScatter,
  kNcclReduce,
  kNcclAllGather,
  kNcclBroadcast,
  kNcclSend,
  kNcclReceive,
};
/// One of NCCL's operations; addresses, and a count as NCCL has it. `peer`: the root, or the other
/// end of a message.
struct CudaNcclCall {
  CudaNcclWhat what;
  int32_t peer;
  uint64_t input, output, count;
};
/// NCCL operations that run as one.
struct NcclPlan {
  std::vector<CudaNcclCall> calls{};
  DType dtype = DType::uint8;  // bytes, where nothing is folded
  ReduceOp op = ReduceOp::sum;
  double factor = 1;  // of every input, for sums of floating-point numbers
  double finish = 1;  // of every result, likewise, where load_scales() has succeeded
};

}  // namespace farandole
