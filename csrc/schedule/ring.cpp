// Ring: every rank passes chunks to the right, as many turns as there are other ranks.
//
//   reduce-scatter, chunk 0 of four ranks:   1 ─► 2 ─► 3 ─► 0      starts right of its owner and
//   all-gather, chunk 0:                     0 ─► 1 ─► 2 ─► 3      ends, complete, with it
//
// The least bytes any algorithm can send, and neighbours only; the price is the number of turns and
// a fold order that starts at another rank for each chunk.
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// The owner's part of folded data, as in reduce_scatter; all_reduce has even shares.
Slice folded_chunk(const Shape& shape, int owner, int lane) {
  return chunk_of(Collective::reduce_scatter, shape, owner, lane);
}

int around(const Shape& shape, int rank) { return (rank + 2 * shape.size) % shape.size; }

/// In turn k I pass on the chunk that k ranks before me have already folded. `place(turn, owner)`
/// is where the chunk folded in that turn lies until it is passed on.
template <typename Place>
void add_reduce(Lane& lane, const Shape& shape, int l, Place place) {
  const int rank = shape.rank, turns = shape.size - 1;
  const int left = around(shape, rank - 1), right = around(shape, rank + 1);
  for (int k = 0; k < turns; ++k) {
    const int out = around(shape, rank - 1 - k), mine = around(shape, rank - 2 - k);
    add(lane,
        {.to = right,
         .send = k == 0 ? folded_chunk(shape, out, l) : place(k - 1, out),
         .from = left,
         .recv = place(k, mine),
         .held = folded_chunk(shape, mine, l),
         .action = left < rank ? Action::fold_lower : Action::fold_upper,
         .leaf_arrived = k == 0,
         .leaf_held = true,
         .finish = k == turns - 1},
        shape.segments);
  }
}

/// In turn k I pass on the chunk of the rank k before me. `chunk(owner)` is its place in output.
template <typename Chunk>
void add_ring_gather(Lane& lane, const Shape& shape, Chunk chunk) {
  const int left = around(shape, shape.rank - 1), right = around(shape, shape.rank + 1);
  for (int k = 0; k < shape.size - 1; ++k)
    add(lane,
        {.to = right,
         .send = chunk(around(shape, shape.rank - k)),
         .from = left,
         .recv = chunk(around(shape, shape.rank - k - 1))},
        shape.segments);
}

/// `passes` times around, each turn as long as the largest chunk takes.
Cost ring_cost(const Shape& shape, double passes, size_t chunk, bool folds) {
  const double turns = shape.size - 1, each = static_cast<double>(chunk);
  return {.rounds = passes * turns * shape.segments,
          .bytes = passes * turns * each,
          .folds = folds ? turns * each : 0};
}

}  // namespace

Schedule ring_all_reduce(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const auto chunk = [&](int owner) { return in(Space::output, folded_chunk(shape, owner, l)); };
    Lane lane;
    add_reduce(lane, shape, l, [&](int, int owner) { return chunk(owner); });
    add_ring_gather(lane, shape, chunk);
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// Only the own chunk has a place in output; what is on its way lies in two slots in turn.
Schedule ring_reduce_scatter(const Shape& shape) {
  const Slice largest{.count = largest_share(Collective::reduce_scatter, shape)};
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const size_t base = schedule.scratch, slot = part(largest, shape.lanes, l).count;
    Lane lane;
    add_reduce(lane, shape, l, [&](int turn, int owner) -> Slice {
      if (turn == shape.size - 2)
        return own_chunk(Collective::reduce_scatter, shape, Space::output, l);
      return {Space::scratch, base + (turn % 2 == 0 ? 0 : slot),
              folded_chunk(shape, owner, l).count};
    });
    if (shape.size > 2) schedule.scratch += 2 * slot;
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

Schedule ring_all_gather(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const auto chunk = [&](int owner) {
      return in(Space::output, chunk_of(Collective::all_gather, shape, owner, l));
    };
    Lane lane;
    add(lane, {.to = shape.rank,
               .send = own_chunk(Collective::all_gather, shape, Space::input, l),
               .from = shape.rank,
               .recv = chunk(shape.rank)});
    add_ring_gather(lane, shape, chunk);
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

Cost ring_all_reduce_cost(const Shape& shape) {
  return ring_cost(shape, 2, largest_share(Collective::reduce_scatter, shape), true);
}

Cost ring_reduce_scatter_cost(const Shape& shape) {
  return ring_cost(shape, 1, largest_share(Collective::reduce_scatter, shape), true);
}

Cost ring_all_gather_cost(const Shape& shape) {
  return ring_cost(shape, 1, largest_share(Collective::all_gather, shape), false);
}

/// Chunk 0 is folded as 0 ⊕ (1 ⊕ 2 ⊕ …): canonical for two ranks and not for more.
Order ring_order(const Shape& shape) {
  return shape.size <= 2 || all_shares(Collective::reduce_scatter, shape) == 0
             ? Order::canonical
             : Order::same_on_all_ranks;
}

}  // namespace farandole
