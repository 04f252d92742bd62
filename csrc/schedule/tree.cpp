#include "schedule/tree.h"

#include <utility>

#include "schedule/slicing.h"

namespace farandole {
namespace {

struct Range {
  int begin, size;
  bool has(int rank) const { return rank >= begin && rank < begin + size; }
};

/// Segment `s`; none outside [0, segments).
Slice segment_of(Slice data, int segments, int s) {
  return s >= 0 && s < segments ? part(data, segments, s) : Slice{};
}

/// The steps of one rank in one lane of up_and_down.
class UpAndDown {
 public:
  UpAndDown(const TreePlace& place, Slice data, int segments)
      : place_(place), data_(data), segments_(segments) {}

  Lane run() {
    const auto& children = place_.children;
    for (int i = 0; i <= segments_ + place_.depth; ++i) {
      // Folding has its order; on the way down the largest subtree comes first.
      if (i < segments_)
        for (auto child = children.begin(); child != children.end(); ++child) meet(*child, i);
      else
        for (auto child = children.rbegin(); child != children.rend(); ++child) meet(*child, i);
      if (place_.parent != kNobody) meet_parent(i);
    }
    return std::move(lane_);
  }

 private:
  Slice output(int s) const { return in(Space::output, segment_of(data_, segments_, s)); }
  Slice input(int s) const { return in(Space::input, segment_of(data_, segments_, s)); }

  void meet(const TreePlace::Child& child, int time) {
    Step step = fold_child(place_, child, input(time), output(time));
    step.to = child.rank;
    step.send = output(time - place_.depth - 1);
    add(lane_, step);
  }

  void meet_parent(int time) {
    add(lane_, {.to = place_.parent,
                .send = place_.children.empty() ? input(time) : output(time),
                .from = place_.parent,
                .recv = output(time - place_.depth)});
  }

  const TreePlace& place_;
  Slice data_;
  int segments_;
  Lane lane_;
};

}  // namespace

Step fold_child(const TreePlace& place, const TreePlace::Child& child, Slice own, Slice into) {
  const bool first = &child == &place.children.front(), last = &child == &place.children.back();
  return {.from = child.rank,
          .recv = into,
          .held = first ? own : into,
          .action = child.action,
          .leaf_arrived = child.is_leaf,
          .leaf_held = first,
          .finish = last && place.parent == kNobody};
}

TreePlace canonical_place(int size, int rank, int root) {
  const auto holder = [&](Range range) { return range.has(root) ? root : range.begin; };
  std::vector<std::pair<Range, Range>> splits;  // the rank's side and the other one, largest first
  for (Range range{0, size}; range.size > 1; range = splits.back().first) {
    const int lower = split_of(range.size);
    Range mine{range.begin, lower}, other{range.begin + lower, range.size - lower};
    if (!mine.has(rank)) std::swap(mine, other);
    splits.emplace_back(mine, other);
  }
  TreePlace place{.rank = rank};
  for (auto split = splits.rbegin(); split != splits.rend(); ++split) {
    const auto [mine, other] = *split;
    const Range both{std::min(mine.begin, other.begin), mine.size + other.size};
    if (holder(mine) != holder(both)) {
      if (holder(mine) == rank) place.parent = holder(both);
      ++place.depth;
    } else if (holder(both) == rank) {
      const Action action = mine.begin < other.begin ? Action::fold_upper : Action::fold_lower;
      place.children.push_back({holder(other), action, other.size == 1});
    }
  }
  return place;
}

Lane up_and_down(const TreePlace& place, Slice data, int segments) {
  return UpAndDown(place, data, segments).run();
}

Lane up(const TreePlace& place, Slice data, int segments, size_t scratch) {
  const auto own = [&](int s) { return in(Space::input, segment_of(data, segments, s)); };
  const size_t slot = part(data, segments, 0).count;
  const auto total = [&](int s) -> Slice {
    if (place.children.empty()) return own(s);
    if (place.parent == kNobody) return in(Space::output, own(s));
    return {Space::scratch, scratch + (s % 2 == 0 ? 0 : slot), own(s).count};
  };
  Lane lane;
  for (int i = 0; i <= segments; ++i) {
    Step pass_on{.to = place.parent, .send = total(i - 1)};
    for (const TreePlace::Child& child : place.children) {
      Step step = fold_child(place, child, own(i), total(i));
      step.to = std::exchange(pass_on.to, kNobody);
      step.send = std::exchange(pass_on.send, {});
      add(lane, step);
    }
    add(lane, pass_on);
  }
  return lane;
}

size_t up_scratch(const TreePlace& place, Slice data, int segments) {
  const bool passes_on = place.parent != kNobody && !place.children.empty();
  return passes_on ? 2 * part(data, segments, 0).count : 0;
}

}  // namespace farandole
