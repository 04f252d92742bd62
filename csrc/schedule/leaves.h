// Several leaves on a rank: what it folds by itself before anything travels.
#pragma once

#include <span>
#include <vector>

#include "schedule/schedule.h"

namespace farandole {

/// A node of the canonical tree over all leaves that lies with one owner while its parent does not:
/// the most that the owner can fold by itself. One leaf on each rank is one partial on each.
struct Partial {
  int owner = 0;           // a rank or, among several hosts, a host
  int begin = 0, end = 0;  // leaves, numbered through all ranks
  bool is_scaled = false;  // what folds is; a leaf may be, too

  bool is_leaf() const { return end - begin == 1; }
  bool is_raw() const { return is_leaf() && !is_scaled; }
};

/// In the order of leaves, whose owners are given.
std::vector<Partial> partials_of(std::span<const int> owner_of);
/// The partials of all ranks.
std::vector<Partial> partials_of(const Shape& shape);

/// Whether every rank's leaves are one partial, equally many on each, so that the tree over ranks
/// is the upper part of the tree over leaves.
bool has_aligned_leaves(const Shape& shape);

/// The partials of the shape's rank: a leaf stays in input, the others are folded into scratch.
class OwnPartials {
 public:
  /// A leaf has `count` elements. Scratch begins at `scratch`.
  OwnPartials(const Shape& shape, size_t count, size_t scratch);

  size_t number() const { return own_.size(); }
  size_t scratch() const { return rows_ * count_; }  // elements

  /// Where partial `i` has `data`, which says elements of a leaf.
  Slice place(size_t i, Slice data) const;

  /// Folds all partials of `data`.
  void fold(Lane& lane, Slice data) const;

 private:
  Slice leaf(int number, Slice data) const;
  Slice row(size_t index, Slice data) const;
  Slice fold(Lane& lane, Slice data, int begin, int end, size_t into, size_t spare) const;

  int rank_, first_;
  size_t count_, scratch_, rows_ = 0;
  std::vector<Partial> own_;
};

/// The schedule of one leaf on each rank, for aligned leaves: a rank folds its own first, and its
/// partial takes the place of its input.
Schedule fold_leaves_first(Collective kind, const Shape& shape, Schedule schedule);

}  // namespace farandole
