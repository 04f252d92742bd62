// Two trees (Sanders, Speck, Träff 2009: Two-tree algorithms for full bandwidth broadcast,
// reduction and scan): even lanes go up and down one binary tree, odd lanes another in which the
// inner ranks of the first are leaves. With two lanes each tree carries half of the data, and
// every rank sends and receives about the same: all of the data once up and once down.
//
//   positions of 8   0 ────────────┐        first tree    rank = position
//                           ┌───── 4 ─┐     second tree   mirrored, rank = 7 - position; for an
//                      ┌─── 2 ─┐      6 ─┐                odd size shifted by one, since there
//                      1       3      5  7                mirroring maps inner to inner
//
// Odd positions are leaves. Below a position lies its left subtree, above it the right one, so
// totals are folded in the order of positions; canonical it is for two ranks alone.
#include <algorithm>

#include "schedule/algorithms.h"
#include "schedule/slicing.h"
#include "schedule/tree.h"

namespace farandole {
namespace {

class BinaryTree {
 public:
  explicit BinaryTree(int size) : size_(size) {}

  int parent(int p) const {
    if (p == 0) return kNobody;
    const int width = p & -p, above = (p ^ width) | (2 * width);
    return above < size_ ? above : p ^ width;
  }
  int depth(int p) const { return p == 0 ? 0 : 1 + depth(parent(p)); }
  int left(int p) const {
    const int width = p & -p;
    return p == 0 || width == 1 ? kNobody : p - width / 2;
  }
  int right(int p) const {
    if (p == 0) return split_of(size_);
    for (int width = (p & -p) / 2; width > 0; width /= 2)
      if (p + width < size_) return p + width;
    return kNobody;
  }
  bool is_leaf(int p) const { return left(p) == kNobody && right(p) == kNobody; }

 private:
  int size_;
};

/// The positions of ranks in the tree of a lane.
class Seating {
 public:
  Seating(int size, int lane) : size_(size), second_(lane % 2 == 1) {}

  int rank_at(int p) const {
    if (p == kNobody || !second_) return p;
    return size_ % 2 == 0 ? size_ - 1 - p : (p + 1) % size_;
  }
  int position_of(int rank) const {
    if (!second_) return rank;
    return size_ % 2 == 0 ? size_ - 1 - rank : (rank + size_ - 1) % size_;
  }
  /// Whether higher positions are lower ranks.
  bool is_mirrored() const { return second_ && size_ % 2 == 0; }

 private:
  int size_;
  bool second_;
};

TreePlace place_of(int size, int rank, int lane) {
  const BinaryTree tree(size);
  const Seating seating(size, lane);
  const int p = seating.position_of(rank);
  TreePlace place{.rank = rank, .parent = seating.rank_at(tree.parent(p)), .depth = tree.depth(p)};
  const auto adopt = [&](int child, bool is_upper) {
    if (child == kNobody) return;
    const Action action =
        is_upper != seating.is_mirrored() ? Action::fold_upper : Action::fold_lower;
    place.children.push_back({seating.rank_at(child), action, tree.is_leaf(child)});
  };
  adopt(tree.left(p), false);
  adopt(tree.right(p), true);
  return place;
}

}  // namespace

Schedule double_tree_all_reduce(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l)
    schedule.lanes.push_back(
        up_and_down(place_of(shape.size, shape.rank, l), lane_data(shape, l), shape.segments));
  return schedule;
}

/// An inner rank of a tree receives each segment from two children and from above. One lane has one
/// tree, so its inner ranks carry everything; with more, each rank is inner for half at most.
Cost double_tree_all_reduce_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), levels = ceil_log2(shape.size);
  const double carried = std::min(shape.lanes == 1 ? 3 : 2, shape.size - 1);
  return {.rounds = 2 * (levels + shape.segments - 1),
          .bytes = n * carried * (1 + (levels - 1) / shape.segments),
          .folds = n * (shape.lanes == 1 ? 2 : 1)};
}

Order double_tree_order(const Shape& shape) {
  return shape.size <= 2 || shape.count == 0 ? Order::canonical : Order::same_on_all_ranks;
}

}  // namespace farandole
