// Trees that are folded up to a root and, for all_reduce, spread down again, in segments: a rank's
// place in one, and the lane that it runs there.
#pragma once

#include <vector>

#include "schedule/schedule.h"

namespace farandole {

struct TreePlace {
  struct Child {
    int rank = kNobody;
    Action action = Action::fold_upper;  // how its total is folded into what the rank has
    bool is_leaf = false;                // it sends its input, raw
  };
  int rank = 0;
  int parent = kNobody;
  int depth = 0;                  // below the root
  std::vector<Child> children{};  // in the order in which they are folded
};

/// The canonical fold tree, pulled up at `root`: the total of a range of ranks lies with the root
/// if that is in the range, else with the first. Towards rank 0 it is the BinomialTree.
///
///   six ranks to root 0   0 ─ 1          to root 3   3 ─ 2
///                         ├── 2 ─ 3                  ├── 0 ─ 1
///                         └── 4 ─ 5                  └── 4 ─ 5
TreePlace canonical_place(int size, int rank, int root);

/// Receives `into` from the child and folds it with what the rank has: its input at `own`, until
/// the first child is folded.
Step fold_child(const TreePlace& place, const TreePlace::Child& child, Slice own, Slice into);

/// Folds `data` (offsets of input and output) up to the root and spreads the result down to all.
///
///   time i: a rank at depth d sends segment i up and receives segment i - d from above in one step
Lane up_and_down(const TreePlace& place, Slice data, int segments);

/// Folds `data` up to the root, into its output. The others have up_scratch elements from `scratch`
/// on, and pass on one segment while they receive the next.
Lane up(const TreePlace& place, Slice data, int segments, size_t scratch);
size_t up_scratch(const TreePlace& place, Slice data, int segments);

}  // namespace farandole
