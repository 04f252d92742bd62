#include "schedule/expectation.h"

#include "schedule/planners.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// Appends `count` elements of one leaf, from `first` on.
void append(std::vector<Origin>& cells, int leaf, size_t first, size_t count) {
  for (size_t i = 0; i < count; ++i)
    cells.push_back({static_cast<uint32_t>(leaf), static_cast<uint32_t>(first + i)});
}

}  // namespace

Expectation::Expectation(Collective collective, const Shape& world)
    : collective_(collective), world_(world) {
  world_.rank = 0;
  require_valid(collective, world_);
}

Shape Expectation::of(int rank) const {
  Shape shape = world_;
  shape.rank = rank;
  return shape;
}

Extents Expectation::extents(int rank) const {
  const Sizes sizes = sizes_of(collective_, of(rank));
  Extents extents{.input = sizes.input, .output = sizes.output};
  switch (collective_) {
    case Collective::all_gather:
    case Collective::gather:
      extents.input_base = share_of(collective_, world_, rank).offset;
      break;
    case Collective::reduce_scatter:
    case Collective::scatter:
      extents.output_base = share_of(collective_, world_, rank).offset;
      break;
    default:
      break;
  }
  return extents;
}

std::vector<Origin> Expectation::input(int rank) const {
  std::vector<Origin> cells;
  if (collective_ == Collective::broadcast && rank != world_.root) return cells;
  const size_t all = extents(rank).input;
  if (!folds(collective_)) {
    append(cells, rank, 0, all);
    return cells;
  }
  const int leaves = leaves_of(world_, rank), first = leaves_before(world_, rank);
  for (int l = 0; l < leaves; ++l) append(cells, first + l, 0, all / static_cast<size_t>(leaves));
  return cells;
}

std::vector<Origin> Expectation::output(int rank) const {
  std::vector<Origin> cells;
  const size_t all = extents(rank).output;
  const auto share = [&](int r) { return share_of(collective_, world_, r); };
  switch (collective_) {
    case Collective::all_reduce:
    case Collective::reduce:
      append(cells, 0, 0, all);
      break;
    case Collective::reduce_scatter:
      append(cells, 0, share(rank).offset, all);
      break;
    case Collective::broadcast:
      append(cells, world_.root, 0, all);
      break;
    case Collective::scatter:
      append(cells, world_.root, share(rank).offset, all);
      break;
    case Collective::all_gather:
    case Collective::gather:
      for (int r = 0; r < world_.size && all > 0; ++r) append(cells, r, 0, share(r).count);
      break;
    case Collective::all_to_all:
      for (int r = 0; r < world_.size; ++r) {
        const Slice block = block_sent(world_, r, rank);
        append(cells, r, block.offset, block.count);
      }
      break;
    case Collective::barrier:
    case Collective::send:
    case Collective::recv:
      break;
  }
  return cells;
}

}  // namespace farandole
