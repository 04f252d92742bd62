// Row "an algorithm" of CONTRIBUTING.md: a chain. The data go up from rank 0, every rank folds its
// own into them, and the last one's result comes back down.
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {

Schedule dummy_all_reduce(const Shape& shape) {
  const int rank = shape.rank, last = shape.size - 1;
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const Slice data = lane_data(shape, l);
    const Slice mine = in(Space::input, data), out = in(Space::output, data);
    Lane lane;
    if (rank > 0)
      add(lane, {.from = rank - 1,
                 .recv = out,
                 .held = mine,
                 .action = Action::fold_lower,
                 .leaf_arrived = rank == 1,
                 .leaf_held = true,
                 .finish = rank == last});
    if (rank < last) {
      add(lane, {.to = rank + 1, .send = rank == 0 ? mine : out});
      add(lane, {.from = rank + 1, .recv = out});
    }
    if (rank > 0) add(lane, {.to = rank - 1, .send = out});
    schedule.lanes.push_back(lane);
  }
  return schedule;
}

Cost dummy_all_reduce_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), hops = shape.size - 1;
  return {.rounds = 2 * hops, .bytes = 2 * n * hops, .folds = n * hops};
}

Order dummy_order(const Shape& shape) {
  return shape.size <= 3 || shape.count == 0 ? Order::canonical : Order::same_on_all_ranks;
}

}  // namespace farandole
