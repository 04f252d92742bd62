#include "schedule/routes.h"

#include <algorithm>

#include "schedule/slicing.h"

namespace farandole {
namespace {

Route whole(Slice take, size_t put_at = 0) { return {take, {Space::output, put_at, take.count}}; }

}  // namespace

Route route(Collective kind, const Shape& shape, int from, int to) {
  const Slice everything{Space::input, 0, shape.count};
  const bool from_root = from == shape.root, to_root = to == shape.root;
  switch (kind) {
    case Collective::all_reduce:
      return whole(everything);
    case Collective::reduce:
      return to_root ? whole(everything) : Route{};
    case Collective::broadcast:
      return from_root ? whole(everything) : Route{};
    case Collective::send:
    case Collective::recv:
      return from_root && !to_root ? whole(everything) : Route{};
    case Collective::reduce_scatter:
      return whole(share_of(kind, shape, to));
    case Collective::scatter:
      return from_root ? whole(share_of(kind, shape, to)) : Route{};
    case Collective::gather:
      if (!to_root) return {};
      [[fallthrough]];
    case Collective::all_gather: {
      const Slice share = share_of(kind, shape, from);
      return whole({Space::input, 0, share.count}, share.offset);
    }
    case Collective::all_to_all:
      return {block_sent(shape, from, to), block_received(shape, from, to)};
    case Collective::barrier:
      break;
  }
  return {};
}

size_t input_count(Collective kind, const Shape& shape, int rank) {
  if (is_between_two(kind)) return rank == shape.root ? shape.count : 0;
  Shape theirs = shape;
  theirs.rank = rank;
  return sizes_of(kind, theirs).input;
}

size_t longest_input(Collective kind, const Shape& shape) {
  const auto p = static_cast<size_t>(shape.size);
  const std::span<const size_t> counts = shape.counts;
  if (counts.empty()) {
    const bool of_blocks = kind == Collective::scatter || kind == Collective::all_to_all;
    return of_blocks ? shape.count * p : shape.count;
  }
  if (kind == Collective::all_gather || kind == Collective::gather)
    return *std::ranges::max_element(counts);
  size_t longest = 0;  // of one row of blocks, or the sum of all
  const size_t row = kind == Collective::all_to_all ? p : counts.size();
  for (size_t at = 0; at < counts.size(); at += row)
    longest = std::max(longest, count_before(counts.subspan(at, row), static_cast<int>(row)));
  return longest;
}

size_t longest_route(Collective kind, const Shape& shape) {
  if (!shape.counts.empty()) return *std::ranges::max_element(shape.counts);
  const auto p = static_cast<size_t>(shape.size);
  return kind == Collective::reduce_scatter ? (shape.count + p - 1) / p : shape.count;
}

}  // namespace farandole
