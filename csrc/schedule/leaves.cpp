#include "schedule/leaves.h"

#include <algorithm>

#include "schedule/slicing.h"

namespace farandole {
namespace {

/// Splits the node that begins with leaf `begin` into the largest nodes with one owner each.
void cover(std::vector<Partial>& partials, std::span<const int> owner_of, int begin) {
  const int size = static_cast<int>(owner_of.size()), owner = owner_of.front();
  if (std::ranges::all_of(owner_of, [&](int other) { return other == owner; })) {
    partials.push_back({owner, begin, begin + size});
    return;
  }
  const int lower = split_of(size);
  cover(partials, owner_of.first(static_cast<size_t>(lower)), begin);
  cover(partials, owner_of.subspan(static_cast<size_t>(lower)), begin + lower);
}

/// Rows that folding needs besides the one it folds into.
size_t spare_rows(int leaves) {
  if (leaves <= 1) return 0;
  const int lower = split_of(leaves), upper = leaves - lower;
  return std::max(spare_rows(lower), upper > 1 ? 1 + spare_rows(upper) : 0);
}

/// The parts of input that a lane reads, as slices that neither touch nor overlap.
std::vector<Slice> input_of(const Lane& lane) {
  std::vector<Slice> slices;
  for (const Step& step : lane)
    for (const Slice& slice : {step.send, step.held})
      if (slice.space == Space::input && slice.count > 0) slices.push_back(slice);
  std::ranges::sort(slices, {}, &Slice::offset);
  std::vector<Slice> stretches;
  for (const Slice& slice : slices) {
    if (stretches.empty() || slice.offset > stretches.back().offset + stretches.back().count) {
      stretches.push_back(slice);
      continue;
    }
    Slice& last = stretches.back();
    last.count = std::max(last.count, slice.offset + slice.count - last.offset);
  }
  return stretches;
}

}  // namespace

std::vector<Partial> partials_of(std::span<const int> owner_of) {
  std::vector<Partial> partials;
  cover(partials, owner_of, 0);
  return partials;
}

std::vector<Partial> partials_of(const Shape& shape) {
  std::vector<int> owner_of;
  for (int r = 0; r < shape.size; ++r)
    owner_of.insert(owner_of.end(), static_cast<size_t>(leaves_of(shape, r)), r);
  return partials_of(owner_of);
}

bool has_aligned_leaves(const Shape& shape) {
  const auto is_first = [&](int leaves) { return leaves == shape.leaves.front(); };
  if (shape.leaves.empty() || shape.size == 1) return true;
  return std::ranges::all_of(shape.leaves, is_first) &&
         std::has_single_bit(static_cast<unsigned>(shape.leaves.front()));
}

OwnPartials::OwnPartials(const Shape& shape, size_t count, size_t scratch)
    : rank_(shape.rank),
      first_(leaves_before(shape, shape.rank)),
      count_(count),
      scratch_(scratch) {
  size_t spare = 0;
  bool folds = false;
  for (const Partial& partial : partials_of(shape)) {
    if (partial.owner != rank_) continue;
    own_.push_back(partial);
    folds = folds || !partial.is_leaf();
    spare = std::max(spare, spare_rows(partial.end - partial.begin));
  }
  if (folds) rows_ = own_.size() + spare;
}

Slice OwnPartials::leaf(int number, Slice data) const {
  return {Space::input, data.offset + static_cast<size_t>(number - first_) * count_, data.count};
}

Slice OwnPartials::row(size_t index, Slice data) const {
  return {Space::scratch, scratch_ + index * count_ + data.offset, data.count};
}

Slice OwnPartials::place(size_t i, Slice data) const {
  return own_[i].is_leaf() ? leaf(own_[i].begin, data) : row(i, data);
}

void OwnPartials::fold(Lane& lane, Slice data) const {
  for (size_t i = 0; i < own_.size(); ++i)
    fold(lane, data, own_[i].begin, own_[i].end, i, own_.size());
}

/// Into row `into`; rows from `spare` on are free. Returns where it lies: a leaf is not moved.
Slice OwnPartials::fold(Lane& lane, Slice data, int begin, int end, size_t into,
                        size_t spare) const {
  if (end - begin == 1) return leaf(begin, data);
  const int middle = begin + split_of(end - begin);
  const Slice lower = fold(lane, data, begin, middle, into, spare);
  const Slice upper = fold(lane, data, middle, end, spare, spare + 1);
  add(lane, {.to = rank_,
             .send = upper,
             .from = rank_,
             .recv = row(into, data),
             .held = lower,
             .action = Action::fold_upper,
             .leaf_arrived = upper.space == Space::input,
             .leaf_held = lower.space == Space::input});
  return row(into, data);
}

Schedule fold_leaves_first(Collective kind, const Shape& shape, Schedule schedule) {
  const size_t count = kind == Collective::reduce_scatter ? all_shares(kind, shape) : shape.count;
  const OwnPartials own(shape, count, schedule.scratch);
  if (own.scratch() == 0) return schedule;  // one leaf each
  for (Lane& lane : schedule.lanes) {
    Lane all;
    for (const Slice& stretch : input_of(lane)) own.fold(all, stretch);
    for (Step step : lane) {
      for (Slice* slice : {&step.send, &step.held})
        if (slice->space == Space::input) *slice = own.place(0, *slice);
      step.leaf_arrived = step.leaf_held = false;
      all.push_back(step);
    }
    lane = std::move(all);
  }
  schedule.scratch += own.scratch();
  return schedule;
}

}  // namespace farandole
