// The canonical tree over what comes in any order.
#pragma once

#include <span>
#include <vector>

#include "schedule/leaves.h"

namespace farandole {

/// Builds the canonical tree over one chunk's partials in whatever order they come: each is folded
/// with its sibling if that is there, and the result with its own sibling, and so on up; otherwise
/// it waits in its slot. About half the folds so happen on data that is just arriving.
class FoldOnArrival {
 public:
  /// Steps are added to `lane` of `rank`. Partial i of all waits in slot(i); the rank's own, whose
  /// number in order is j, is there from the beginning in own(j). `result` takes the total and,
  /// before, the first fold that swallows the rank's first leaf. A total that is not to be finished
  /// is a partial of something larger; a single leaf that is there already stays where it is.
  template <typename Slot, typename Own>
  FoldOnArrival(Lane& lane, int rank, std::span<const Partial> partials, Slice result, Slot slot,
                Own own, bool finishes = true)
      : lane_(lane), rank_(rank), partials_(partials), result_(result), finishes_(finishes) {
    plant(0, partials.back().end);
    size_t owned = 0;
    for (size_t i = 0; i < partials.size(); ++i) {
      Node& node = nodes_[node_of_[i]];
      node.place = node.target = slot(i);
      if (partials[i].owner != rank) continue;
      node.place = own(owned);
      if (node.place.space != Space::input) node.target = node.place;
      if (node.place.space == Space::input && owned == 0) node.target = result;
      node.is_there = true;
      ++owned;
    }
    if (finishes_ && nodes_.size() == 1 && owned == 1) finish_alone();
  }

  /// Partial `i`, of rank step.from, comes with `step`, whose receiving half is filled in here.
  void arrive(Step step, size_t i);

 private:
  static constexpr size_t kRoot = static_cast<size_t>(-1);
  struct Node {
    size_t parent = kRoot, sibling = kRoot;
    Slice place{};   // where it lies, or waits
    Slice target{};  // where a fold goes that holds it: input is not written
    bool is_upper = false, is_there = false;
  };

  size_t plant(int begin, int size);
  size_t fold_into(size_t sibling, Step& step);
  size_t climb(size_t node);
  void finish_alone();

  Lane& lane_;
  int rank_;
  std::span<const Partial> partials_;
  Slice result_;
  bool finishes_;
  std::vector<Node> nodes_;
  std::vector<size_t> node_of_;  // by partial
};

}  // namespace farandole
