// How a large collective is cut into blocks, as a rank sees it: in each block, the slices it shows
// to each rank, the slices it takes from each rank, and where they stand in slots.
//
//   collective                               a block of rank r's input          its slot holds
//   all_reduce, reduce                       size chunks; rank t folds the t-th a chunk per reader
//   reduce_scatter, scatter, all_to_all      a chunk of what each rank takes    a chunk per reader
//   broadcast, send, all_gather, gather      size chunks, for everybody         the block
#pragma once

#include <vector>

#include "backends/direct_path.h"

namespace farandole {

class Blocks {
 public:
  /// `chunk` is in elements; a slot holds one for every rank.
  void start(const DirectOperation& what, size_t chunk);

  uint64_t count() const { return blocks_; }
  /// The slice of my input in block b that rank `to` takes.
  Slice shown_to(int to, uint64_t b) const;
  /// The slice of rank `from`'s input in block b that I take, and where it stands in my output.
  Route taken_from(int from, uint64_t b) const;
  /// The part of block b whose result rank r folds for others (two phases only).
  Slice folded_by(int r, uint64_t b) const;

  /// Whether all ranks read the same of a block.
  bool in_common() const { return in_common_; }
  /// Whether ranks fold parts for others, which gather the results.
  bool two_phases() const { return two_phases_; }

 private:
  Slice cut(Slice whole, uint64_t b) const;

  int size_ = 1, rank_ = 0;
  size_t chunk_ = 1, step_ = 1, total_ = 0;
  uint64_t blocks_ = 0;
  bool in_common_ = false, two_phases_ = false;
  std::vector<Slice> shown_;  // of my input, by reader
  std::vector<Route> taken_;  // by owner
};

}  // namespace farandole
