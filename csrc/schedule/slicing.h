// Cutting data into parts, and numbers into powers of two. Everything here is constexpr arithmetic.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <numeric>
#include <span>

#include "schedule/schedule.h"

namespace farandole {

/// Part `index` of `parts` as equal as can be: the first ones get one more when it does not divide.
constexpr Slice part(Slice whole, int parts, int index) {
  const size_t n = static_cast<size_t>(parts), i = static_cast<size_t>(index);
  const size_t each = whole.count / n, more = whole.count % n;
  return {whole.space, whole.offset + i * each + std::min(i, more), each + (i < more ? 1 : 0)};
}

/// The same offsets in another space.
constexpr Slice in(Space space, Slice slice) { return {space, slice.offset, slice.count}; }

/// The part of `slice` inside `window`; both are offsets of one space.
constexpr Slice clip(Slice slice, Slice window) {
  const size_t begin = std::max(slice.offset, window.offset);
  const size_t end = std::min(slice.offset + slice.count, window.offset + window.count);
  return {slice.space, begin, end > begin ? end - begin : 0};
}

/// From the first slice's begin to the last one's end.
constexpr Slice join(Slice first, Slice last) {
  return {first.space, first.offset, last.offset + last.count - first.offset};
}

/// Where the canonical fold tree over `size` > 1 leaves splits: the largest power of two below
/// size.
constexpr int split_of(int size) {
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(size - 1)));
}

constexpr int floor_log2(int n) { return std::bit_width(static_cast<unsigned>(n)) - 1; }
constexpr int ceil_log2(int n) { return std::bit_width(static_cast<unsigned>(n - 1)); }

/// The data of one lane of a collective on whole buffers.
constexpr Slice lane_data(const Shape& shape, int lane) {
  return part({Space::input, 0, shape.count}, shape.lanes, lane);
}

/// Sum of the first `blocks` counts.
constexpr size_t count_before(std::span<const size_t> counts, int blocks) {
  return std::accumulate(counts.begin(), counts.begin() + blocks, size_t{0});
}

/// Where rank `owner`'s share lies among those of all ranks: in the input of reduce_scatter and
/// scatter, in the output of all_gather and gather.
constexpr Slice share_of(Collective kind, const Shape& shape, int owner) {
  const auto r = static_cast<size_t>(owner);
  if (!shape.counts.empty())
    return {Space::input, count_before(shape.counts, owner), shape.counts[r]};
  if (kind == Collective::reduce_scatter)
    return part({Space::input, 0, shape.count}, shape.size, owner);
  return {Space::input, r * shape.count, shape.count};
}

/// One lane's part of that share. An all_reduce deals its data out like reduce_scatter.
constexpr Slice chunk_of(Collective kind, const Shape& shape, int owner, int lane) {
  return part(share_of(kind, shape, owner), shape.lanes, lane);
}

/// The shape's rank's share where it lies alone: in the output of reduce_scatter and scatter, in
/// the input of all_gather and gather.
constexpr Slice own_chunk(Collective kind, const Shape& shape, Space space, int lane) {
  return part({space, 0, share_of(kind, shape, shape.rank).count}, shape.lanes, lane);
}

/// all_to_all: the block that rank `from` has for rank `to`, in the sender's input.
constexpr Slice block_sent(const Shape& shape, int from, int to) {
  const auto p = static_cast<size_t>(shape.size), f = static_cast<size_t>(from),
             t = static_cast<size_t>(to);
  if (shape.counts.empty()) return {Space::input, t * shape.count, shape.count};
  return {Space::input, count_before(shape.counts.subspan(f * p, p), to), shape.counts[f * p + t]};
}

/// The same block in the receiver's output.
constexpr Slice block_received(const Shape& shape, int from, int to) {
  const auto p = static_cast<size_t>(shape.size), f = static_cast<size_t>(from),
             t = static_cast<size_t>(to);
  if (shape.counts.empty()) return {Space::output, f * shape.count, shape.count};
  size_t before = 0;
  for (size_t r = 0; r < f; ++r) before += shape.counts[r * p + t];
  return {Space::output, before, shape.counts[f * p + t]};
}

/// Elements of the input and output of the shape's rank, by the table in schedule.h.
struct Sizes {
  size_t input = 0;
  size_t output = 0;
};
Sizes sizes_of(Collective kind, const Shape& shape);

/// Leaves held by the ranks below `rank`, by itself, and by all.
constexpr int leaves_before(const Shape& shape, int rank) {
  if (shape.leaves.empty()) return rank;
  return std::accumulate(shape.leaves.begin(), shape.leaves.begin() + rank, 0);
}
constexpr int leaves_of(const Shape& shape, int rank) {
  return leaves_before(shape, rank + 1) - leaves_before(shape, rank);
}
constexpr int leaf_count(const Shape& shape) { return leaves_before(shape, shape.size); }

/// Elements of the largest share, of all_to_all the largest block, and of all shares together.
size_t largest_share(Collective kind, const Shape& shape);
size_t all_shares(Collective kind, const Shape& shape);

/// Adds a step in `segments` pieces. Empty halves are dropped, and steps with nothing left: both
/// ends of a transfer know its length, so they drop the same ones.
void add(Lane& lane, const Step& step, int segments = 1);

/// A binomial tree on [0, size) with the nearest children first: the subtree of r is [r, r + w),
/// where w is r's lowest set bit, and its children are r + 1, r + 2, r + 4 … below r + w.
///
///   0 ── 1      Folding nearest first makes r's total grow as [r, r+1), [r, r+2), [r, r+4) …:
///   ├─── 2 ─ 3  each time by an aligned neighbour, the last one split off at the largest power
///   └─── 4 ─ 5  of two below the length. That is the canonical order, for every size.
struct BinomialTree {
  int size;

  constexpr int width(int rank) const { return rank == 0 ? size : rank & -rank; }
  constexpr int end(int rank) const { return std::min(rank + width(rank), size); }
  constexpr int parent(int rank) const { return rank == 0 ? kNobody : rank & (rank - 1); }
  constexpr int depth(int rank) const { return std::popcount(static_cast<unsigned>(rank)); }
  constexpr bool has_children(int rank) const { return end(rank) - rank > 1; }
  /// Calls visit(child) from the nearest to the farthest.
  template <typename Visit>
  constexpr void ascending(int rank, Visit visit) const {
    for (int w = 1; rank + w < end(rank); w *= 2) visit(rank + w);
  }
  template <typename Visit>
  constexpr void descending(int rank, Visit visit) const {
    if (!has_children(rank)) return;
    for (int w = split_of(end(rank) - rank); w > 0; w /= 2) visit(rank + w);
  }
};

}  // namespace farandole
