// Binomial: one tree (BinomialTree, slicing.h), up to rank 0 and down again, pipelined over
// segments. Few rounds and few messages; rank 0 carries the data log2(size) times, which segments
// hide in part because up and down go at once.
//
//   time i:   a rank at depth d sends segment i up and receives segment i - d from above in one
//   step
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// How the contribution of `child` is folded into what `rank` has: `data` is the slice folded, and
/// its own contribution lies at `own`, raw until the nearest child is folded.
Step fold_child(const BinomialTree& tree, int rank, int child, Slice own, Slice data) {
  const bool nearest = child == rank + 1;
  const bool last = tree.parent(rank) == kNobody && child == rank + split_of(tree.size);
  return {.from = child,
          .recv = data,
          .held = nearest ? own : data,
          .action = Action::fold_upper,
          .leaf_arrived = !tree.has_children(child),
          .leaf_held = nearest,
          .finish = last};
}

/// The steps of one rank and lane. `segment(s)` lies in output; none for s outside [0, segments).
class UpAndDown {
 public:
  UpAndDown(const Shape& shape, Slice data)
      : tree_{shape.size}, rank_(shape.rank), segments_(shape.segments), data_(data) {}

  Lane run() {
    const int depth = tree_.depth(rank_);
    for (int i = 0; i <= segments_ + depth; ++i) {
      // Folding wants the nearest child first, and the way down the largest subtree first.
      const auto child = [&](int c) { meet_child(c, i, i - depth - 1); };
      if (i < segments_)
        tree_.ascending(rank_, child);
      else
        tree_.descending(rank_, child);
      if (tree_.parent(rank_) != kNobody) meet_parent(i, i - depth);
    }
    return std::move(lane_);
  }

 private:
  Slice segment(int s) const {
    return s >= 0 && s < segments_ ? part(data_, segments_, s) : Slice{};
  }

  void meet_child(int child, int up, int down) {
    Step step = fold_child(tree_, rank_, child, in(Space::input, segment(up)), segment(up));
    step.to = child;
    step.send = segment(down);
    add(lane_, step);
  }

  void meet_parent(int up, int down) {
    const int parent = tree_.parent(rank_);
    const Space from = tree_.has_children(rank_) ? Space::output : Space::input;
    add(lane_,
        {.to = parent, .send = in(from, segment(up)), .from = parent, .recv = segment(down)});
  }

  BinomialTree tree_;
  int rank_, segments_;
  Slice data_;
  Lane lane_;
};

/// Reduce to rank 0 within scratch, then every child is sent what its subtree owns.
class ReduceThenScatter {
 public:
  ReduceThenScatter(const Shape& shape, int lane)
      : shape_(shape), tree_{shape.size}, data_(in(Space::scratch, lane_data(shape, lane))) {}

  Lane run() {
    for (int s = 0; s < shape_.segments; ++s) up(part(data_, shape_.segments, s));
    for (int s = 0; s < shape_.segments; ++s) down(part(data_, shape_.segments, s));
    return std::move(lane_);
  }

 private:
  void up(Slice segment) {
    const int rank = shape_.rank, parent = tree_.parent(rank);
    const Slice own = in(Space::input, segment);
    tree_.ascending(rank,
                    [&](int child) { add(lane_, fold_child(tree_, rank, child, own, segment)); });
    if (parent != kNobody)
      add(lane_, {.to = parent, .send = tree_.has_children(rank) ? segment : own});
  }

  void down(Slice segment) {
    const int rank = shape_.rank, parent = tree_.parent(rank);
    const auto owned = [&](int owner) { return part({.count = shape_.count}, shape_.size, owner); };
    const auto subtree = [&](int r) {
      return in(Space::scratch, clip(join(owned(r), owned(tree_.end(r) - 1)), segment));
    };
    Slice mine = clip(owned(rank), segment), result = mine;
    result.offset -= owned(rank).offset * (mine.count > 0);
    if (!tree_.has_children(rank)) return add(lane_, {.from = parent, .recv = result});
    if (parent != kNobody) add(lane_, {.from = parent, .recv = subtree(rank)});
    tree_.descending(rank, [&](int child) { add(lane_, {.to = child, .send = subtree(child)}); });
    add(lane_, {.to = rank, .send = in(Space::scratch, mine), .from = rank, .recv = result});
  }

  const Shape& shape_;
  BinomialTree tree_;
  Slice data_;
  Lane lane_;
};

}  // namespace

Schedule binomial_all_reduce(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l)
    schedule.lanes.push_back(UpAndDown(shape, in(Space::output, lane_data(shape, l))).run());
  return schedule;
}

Schedule binomial_reduce_scatter(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) schedule.lanes.push_back(ReduceThenScatter(shape, l).run());
  schedule.scratch = BinomialTree{shape.size}.has_children(shape.rank) ? shape.count : 0;
  return schedule;
}

/// Ranks are counted from the root. A rank receives a segment while it passes on the one before.
Schedule binomial_broadcast(const Shape& shape) {
  const BinomialTree tree{shape.size};
  const auto real = [&](int r) { return r == kNobody ? r : (r + shape.root) % shape.size; };
  const int me = (shape.rank - shape.root + shape.size) % shape.size;
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    const Slice data = in(Space::output, lane_data(shape, l));
    const Slice source = in(me == 0 ? Space::input : Space::output, data);
    const auto segment = [&](Slice whole, int s) {
      return s >= 0 && s < shape.segments ? part(whole, shape.segments, s) : Slice{};
    };
    for (int i = 0; i <= shape.segments; ++i) {
      Step step{.from = real(tree.parent(me)), .recv = segment(data, i)};
      tree.descending(me, [&](int child) {
        step.to = real(child);
        step.send = segment(source, i - 1);
        add(lane, step);
        step = {};
      });
      add(lane, step);
    }
    if (me == 0) add(lane, {.to = shape.rank, .send = source, .from = shape.rank, .recv = data});
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

Cost binomial_all_reduce_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), levels = ceil_log2(shape.size);
  return {.rounds = 2.0 * (floor_log2(shape.size) + shape.segments - 1),
          .bytes = n * levels * (1 + 1.0 / shape.segments),
          .folds = n * levels};
}

Cost binomial_reduce_scatter_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), levels = ceil_log2(shape.size);
  return {.rounds = 2.0 * floor_log2(shape.size), .bytes = n * levels + n, .folds = n * levels};
}

Cost binomial_broadcast_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), levels = ceil_log2(shape.size);
  return {.rounds = static_cast<double>(floor_log2(shape.size)), .bytes = n * levels};
}

}  // namespace farandole
