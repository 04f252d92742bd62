// Gather and scatter: every rank's share to the root, or from it.
//
//   direct     each rank deals with the root itself: the fewest bytes, and a message for each rank
//   binomial   shares travel along a BinomialTree over ranks counted from the root, a whole subtree
//              in one message: few messages, all ranks' shares at the root's side
#include <algorithm>

#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

using enum Collective;

int ring_rank(const Shape& shape, int k) { return (shape.root + k) % shape.size; }

/// The shares of a binomial subtree, by one rank of it. Ranks are counted from the root here; where
/// the count wraps around, a subtree is two stretches of the root's memory and two messages.
class Subtrees {
 public:
  Subtrees(Collective kind, const Shape& shape)
      : kind_(kind),
        shape_(shape),
        tree_{shape.size},
        me_((shape.rank - shape.root + shape.size) % shape.size) {}

  int me() const { return me_; }
  const BinomialTree& tree() const { return tree_; }
  int rank_of(int k) const { return k == kNobody ? k : ring_rank(shape_, k); }

  /// Elements of [begin, end).
  size_t span(int begin, int end) const {
    size_t count = 0;
    for (int k = begin; k < end; ++k) count += share(k).count;
    return count;
  }

  /// Calls visit(slice) for each message with the subtree of `k`, which is a rank's own or that of
  /// a child. The root has all shares at their place; a leaf its own share; the others a row in
  /// scratch.
  template <typename Visit>
  void each_message(int k, Visit visit) const {
    const int end = tree_.end(k), wrap = shape_.size - shape_.root;
    const int cut = std::clamp(wrap, k, end);
    if (k < cut) visit(place(k, cut));
    if (cut < end) visit(place(cut, end));
  }

  Slice own() const { return place(me_, me_ + 1); }

  /// Elements of scratch that a rank needs to pass subtrees on.
  size_t scratch() const {
    return me_ == 0 || !tree_.has_children(me_) ? 0 : span(me_, tree_.end(me_));
  }

 private:
  Slice share(int k) const { return share_of(kind_, shape_, ring_rank(shape_, k)); }

  Slice place(int first, int last) const {
    const Space outside = kind_ == gather ? Space::output : Space::input;
    const Space inside = kind_ == gather ? Space::input : Space::output;
    const size_t count = span(first, last);
    if (me_ == 0) return {outside, share(first).offset, count};
    if (!tree_.has_children(me_)) return {inside, 0, count};
    return {Space::scratch, span(me_, first), count};
  }

  Collective kind_;
  const Shape& shape_;
  BinomialTree tree_;
  int me_;
};

/// When the subtree of `k` has come together at its root, in bytes along the longest path.
double gathered_after(const Subtrees& subtrees, int k) {
  double time = 0;
  subtrees.tree().ascending(k, [&](int child) {
    const auto message = static_cast<double>(subtrees.span(child, subtrees.tree().end(child)));
    time = std::max(time, gathered_after(subtrees, child)) + message;
  });
  return time;
}

/// Scattering is gathering backwards.
Cost binomial_cost(Collective kind, const Shape& shape) {
  return {.rounds = static_cast<double>(floor_log2(shape.size)),
          .bytes = gathered_after(Subtrees(kind, shape), 0)};
}

Cost direct_cost(Collective kind, const Shape& shape) {
  const size_t others = all_shares(kind, shape) - share_of(kind, shape, shape.root).count;
  return {.rounds = 1,
          .bytes = static_cast<double>(others),
          .messages = static_cast<double>(shape.size) - 2};
}

}  // namespace

Schedule direct_gather(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    const Slice own = own_chunk(gather, shape, Space::input, l);
    const auto chunk = [&](int rank) {
      return in(Space::output, chunk_of(gather, shape, rank, l));
    };
    if (shape.rank == shape.root) {
      add(lane, {.to = shape.rank, .send = own, .from = shape.rank, .recv = chunk(shape.rank)});
      for (int k = 1; k < shape.size; ++k)
        add(lane, {.from = ring_rank(shape, k), .recv = chunk(ring_rank(shape, k))});
    } else {
      add(lane, {.to = shape.root, .send = own});
    }
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

Schedule direct_scatter(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    const Slice own = own_chunk(scatter, shape, Space::output, l);
    const auto chunk = [&](int rank) { return chunk_of(scatter, shape, rank, l); };
    if (shape.rank == shape.root) {
      for (int k = 1; k < shape.size; ++k)
        add(lane, {.to = ring_rank(shape, k), .send = chunk(ring_rank(shape, k))});
      add(lane, {.to = shape.rank, .send = chunk(shape.rank), .from = shape.rank, .recv = own});
    } else {
      add(lane, {.from = shape.root, .recv = own});
    }
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// For small shares, so in one lane, whatever the shape says.
Schedule binomial_gather(const Shape& shape) {
  const Subtrees subtrees(gather, shape);
  const BinomialTree& tree = subtrees.tree();
  const int me = subtrees.me(), parent = subtrees.rank_of(tree.parent(me));
  Schedule schedule{.lanes = {Lane{}}, .scratch = subtrees.scratch()};
  Lane& lane = schedule.lanes.front();
  if (tree.has_children(me))
    add(lane, {.to = shape.rank,
               .send = {Space::input, 0, subtrees.own().count},
               .from = shape.rank,
               .recv = subtrees.own()});
  tree.ascending(me, [&](int child) {
    subtrees.each_message(
        child, [&](Slice slice) { add(lane, {.from = subtrees.rank_of(child), .recv = slice}); });
  });
  if (me != 0)
    subtrees.each_message(me, [&](Slice slice) { add(lane, {.to = parent, .send = slice}); });
  return schedule;
}

Schedule binomial_scatter(const Shape& shape) {
  const Subtrees subtrees(scatter, shape);
  const BinomialTree& tree = subtrees.tree();
  const int me = subtrees.me(), parent = subtrees.rank_of(tree.parent(me));
  Schedule schedule{.lanes = {Lane{}}, .scratch = subtrees.scratch()};
  Lane& lane = schedule.lanes.front();
  if (me != 0)
    subtrees.each_message(me, [&](Slice slice) { add(lane, {.from = parent, .recv = slice}); });
  tree.descending(me, [&](int child) {
    subtrees.each_message(
        child, [&](Slice slice) { add(lane, {.to = subtrees.rank_of(child), .send = slice}); });
  });
  if (tree.has_children(me))
    add(lane, {.to = shape.rank,
               .send = subtrees.own(),
               .from = shape.rank,
               .recv = {Space::output, 0, subtrees.own().count}});
  return schedule;
}

Cost direct_gather_cost(const Shape& shape) { return direct_cost(gather, shape); }
Cost direct_scatter_cost(const Shape& shape) { return direct_cost(scatter, shape); }
Cost binomial_gather_cost(const Shape& shape) { return binomial_cost(gather, shape); }
Cost binomial_scatter_cost(const Shape& shape) { return binomial_cost(scatter, shape); }

}  // namespace farandole
