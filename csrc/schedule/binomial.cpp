// Binomial: one tree (canonical_place in tree.h), up to the root and, for all_reduce, down again.
// Few rounds and few messages; the root carries the data log2(size) times, which segments hide in
// part because up and down go at once.
#include "schedule/algorithms.h"
#include "schedule/slicing.h"
#include "schedule/tree.h"

namespace farandole {
namespace {

/// Reduce to rank 0 within scratch, then every child is sent what its subtree owns.
class ReduceThenScatter {
 public:
  ReduceThenScatter(const Shape& shape, int lane)
      : shape_(shape),
        tree_{shape.size},
        place_(canonical_place(shape.size, shape.rank, 0)),
        data_(part({Space::scratch, 0, all_shares(Collective::reduce_scatter, shape)}, shape.lanes,
                   lane)) {}

  Lane run() {
    for (int s = 0; s < shape_.segments; ++s) up(part(data_, shape_.segments, s));
    for (int s = 0; s < shape_.segments; ++s) down(part(data_, shape_.segments, s));
    return std::move(lane_);
  }

 private:
  void up(Slice segment) {
    const Slice own = in(Space::input, segment);
    for (const TreePlace::Child& child : place_.children)
      add(lane_, fold_child(place_, child, own, segment));
    if (place_.parent != kNobody)
      add(lane_, {.to = place_.parent, .send = place_.children.empty() ? own : segment});
  }

  void down(Slice segment) {
    const int rank = shape_.rank, parent = place_.parent;
    const auto owned = [&](int owner) {
      return share_of(Collective::reduce_scatter, shape_, owner);
    };
    const auto subtree = [&](int r) {
      return in(Space::scratch, clip(join(owned(r), owned(tree_.end(r) - 1)), segment));
    };
    Slice mine = clip(owned(rank), segment), result = in(Space::output, mine);
    result.offset -= owned(rank).offset * (mine.count > 0);
    if (place_.children.empty()) return add(lane_, {.from = parent, .recv = result});
    if (parent != kNobody) add(lane_, {.from = parent, .recv = subtree(rank)});
    tree_.descending(rank, [&](int child) { add(lane_, {.to = child, .send = subtree(child)}); });
    add(lane_, {.to = rank, .send = in(Space::scratch, mine), .from = rank, .recv = result});
  }

  const Shape& shape_;
  BinomialTree tree_;
  TreePlace place_;
  Slice data_;
  Lane lane_;
};

}  // namespace

Schedule binomial_all_reduce(const Shape& shape) {
  const TreePlace place = canonical_place(shape.size, shape.rank, 0);
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l)
    schedule.lanes.push_back(up_and_down(place, lane_data(shape, l), shape.segments));
  return schedule;
}

Schedule binomial_reduce(const Shape& shape) {
  const TreePlace place = canonical_place(shape.size, shape.rank, shape.root);
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const Slice data = lane_data(shape, l);
    schedule.lanes.push_back(up(place, data, shape.segments, schedule.scratch));
    schedule.scratch += up_scratch(place, data, shape.segments);
  }
  return schedule;
}

Schedule binomial_reduce_scatter(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) schedule.lanes.push_back(ReduceThenScatter(shape, l).run());
  if (BinomialTree{shape.size}.has_children(shape.rank))
    schedule.scratch = all_shares(Collective::reduce_scatter, shape);
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

/// The root receives each segment from log2(size) children, one after the other.
Cost binomial_reduce_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), levels = ceil_log2(shape.size);
  return {.rounds = levels, .bytes = n * levels, .folds = n * levels};
}

Cost binomial_reduce_scatter_cost(const Shape& shape) {
  const double n = static_cast<double>(all_shares(Collective::reduce_scatter, shape));
  const double levels = ceil_log2(shape.size);
  return {.rounds = 2.0 * floor_log2(shape.size), .bytes = n * levels + n, .folds = n * levels};
}

Cost binomial_broadcast_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), levels = ceil_log2(shape.size);
  return {.rounds = static_cast<double>(floor_log2(shape.size)), .bytes = n * levels};
}

}  // namespace farandole
