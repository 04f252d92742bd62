#include "schedule/fold_on_arrival.h"

#include "schedule/slicing.h"

namespace farandole {

/// The node over leaves [begin, begin + size), down to the partials, which come in their order.
size_t FoldOnArrival::plant(int begin, int size) {
  const size_t id = nodes_.size();
  nodes_.emplace_back();
  if (partials_[node_of_.size()].end == begin + size) {
    node_of_.push_back(id);
    return id;
  }
  const int lower_size = split_of(size);
  const size_t lower = plant(begin, lower_size);
  const size_t upper = plant(begin + lower_size, size - lower_size);
  nodes_[lower].parent = nodes_[upper].parent = id;
  nodes_[lower].sibling = upper;
  nodes_[upper].sibling = lower;
  nodes_[upper].is_upper = true;
  return id;
}

void FoldOnArrival::arrive(Step step, size_t i) {
  size_t node = node_of_[i];
  step.leaf_arrived = partials_[i].is_raw();
  const size_t sibling = nodes_[node].sibling;
  if (sibling == kRoot) {
    step.recv = result_;
    step.finish = finishes_;
  } else if (nodes_[sibling].is_there) {
    step.action = nodes_[node].is_upper ? Action::fold_upper : Action::fold_lower;
    node = fold_into(sibling, step);
  } else {
    step.recv = nodes_[node].place;
    nodes_[node].is_there = true;
  }
  add(lane_, step);
  while (nodes_[node].parent != kRoot && nodes_[nodes_[node].sibling].is_there) node = climb(node);
}

/// Completes `step`: what arrives is folded with `sibling`, and their parent is there.
size_t FoldOnArrival::fold_into(size_t sibling, Step& step) {
  const size_t parent = nodes_[sibling].parent;
  const bool is_total = nodes_[parent].parent == kRoot;
  step.held = nodes_[sibling].place;
  step.leaf_held = step.held.space == Space::input;
  step.recv = is_total ? result_ : nodes_[sibling].target;
  step.finish = is_total && finishes_;
  nodes_[parent].place = nodes_[parent].target = step.recv;
  nodes_[parent].is_there = true;
  return parent;
}

size_t FoldOnArrival::climb(size_t node) {
  Step step{.to = rank_,
            .send = nodes_[node].place,
            .from = rank_,
            .action = nodes_[node].is_upper ? Action::fold_upper : Action::fold_lower,
            .leaf_arrived = nodes_[node].place.space == Space::input};
  const size_t parent = fold_into(nodes_[node].sibling, step);
  add(lane_, step);
  return parent;
}

/// The rank holds all leaves there are.
void FoldOnArrival::finish_alone() {
  add(lane_, {.to = rank_,
              .send = nodes_.front().place,
              .from = rank_,
              .recv = result_,
              .leaf_arrived = partials_.front().is_raw(),
              .finish = true});
}

}  // namespace farandole
