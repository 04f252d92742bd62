#include "schedule/slicing.h"

namespace farandole {

size_t largest_share(Collective kind, const Shape& shape) {
  if (!shape.counts.empty()) return *std::ranges::max_element(shape.counts);
  return kind == Collective::all_to_all ? shape.count : share_of(kind, shape, 0).count;
}

size_t all_shares(Collective kind, const Shape& shape) {
  if (!shape.counts.empty())
    return count_before(shape.counts, static_cast<int>(shape.counts.size()));
  if (kind == Collective::reduce_scatter) return shape.count;
  return shape.count * static_cast<size_t>(shape.size);
}

Sizes sizes_of(Collective kind, const Shape& shape) {
  const bool root = shape.rank == shape.root;
  const auto share = [&](int r) { return share_of(kind, shape, r).count; };
  const auto all = [&] { return all_shares(kind, shape); };
  const auto leaves = static_cast<size_t>(leaves_of(shape, shape.rank));
  switch (kind) {
    case Collective::all_reduce:
      return {leaves * shape.count, shape.count};
    case Collective::broadcast:
      return {shape.count, shape.count};
    case Collective::reduce:
      return {leaves * shape.count, root ? shape.count : 0};
    case Collective::reduce_scatter:
      return {leaves * all(), share(shape.rank)};
    case Collective::all_gather:
      return {share(shape.rank), all()};
    case Collective::gather:
      return {share(shape.rank), root ? all() : 0};
    case Collective::scatter:
      return {root ? all() : 0, share(shape.rank)};
    case Collective::all_to_all: {
      Sizes sizes;
      for (int r = 0; r < shape.size; ++r) {
        sizes.input += block_sent(shape, shape.rank, r).count;
        sizes.output += block_received(shape, r, shape.rank).count;
      }
      return sizes;
    }
    case Collective::barrier:
    case Collective::send:
    case Collective::recv:
      break;
  }
  return {};
}

void add(Lane& lane, const Step& step, int segments) {
  for (int s = 0; s < segments; ++s) {
    Step piece = step;
    piece.send = part(step.send, segments, s);
    piece.recv = part(step.recv, segments, s);
    piece.held = part(step.held, segments, s);
    if (piece.to == kNobody || piece.send.count == 0) {
      piece.to = kNobody;
      piece.send = {};
    }
    if (piece.from == kNobody || piece.recv.count == 0) {
      piece.from = kNobody;
      piece.recv = piece.held = {};
      piece.action = Action::store;
      piece.leaf_arrived = piece.leaf_held = piece.finish = false;
    }
    if (piece.to != kNobody || piece.from != kNobody) lane.push_back(piece);
  }
}

}  // namespace farandole
