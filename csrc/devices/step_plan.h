// How a collective is cut into pieces that fit a bucket, and what each piece moves and folds: pure
// arithmetic, the same on all ranks but for what is a rank's own.
#pragma once

#include <vector>

#include "cuda/work.h"
#include "devices/stretches.h"
#include "schedule/schedule.h"

namespace farandole {

/// A collective among devices, as one rank sees it. `shape` refers to whatever its counts do.
struct StepShape {
  Collective kind;
  Shape shape{};
  size_t element = 0;      // bytes
  size_t piece_bytes = 0;  // of a bucket, for one piece; 64 bytes for each rank at least
  bool in_place = false;   // input and output begin at one address
  bool apart = false;      // input and output are several arrays
  bool own_stays = false;  // this rank's part is folded from and to where the arrays have it
  bool updates = false;    // an all-reduce whose sums each rank makes new values of, in its part
  size_t tile = 0;  // elements; not 0: sums are looked at by such tiles, and there are no values
};

/// All in bytes, but for what is folded: that is in elements of the bucket.
struct StepPiece {
  std::vector<CudaMove> in, out;
  size_t first = 0, count = 0;  // folded
  int folds_to = kFoldsToOutput;
  size_t fold_to = 0;  // where in the output
  bool own_stays = false;
  size_t own_from = 0, own_to = 0;  // where in input and output this rank's part is, if it stays
  Slice mine{};  // what of the whole this rank updates, behind `first` of the bucket
};

/// Whether steps can run it.
bool has_steps(Collective kind);

/// Elements of the longer of input and output, of the rank where that is longest.
size_t amount_of(Collective kind, const Shape& shape);

size_t pieces_of(const StepShape& step);
StepPiece piece_of(const StepShape& step, size_t index);
/// The elements of the whole that are in the piece. All of them where it is cut by shares.
Slice stretch_of(const StepShape& step, size_t index);
/// For arrays that lie apart: turns the piece's offsets in input and output into addresses.
void lie_apart(StepPiece& piece, const Stretches& input, const Stretches& output);

}  // namespace farandole
