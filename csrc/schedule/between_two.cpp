// From one rank to another, as it is: no collective, so no planner of the table.
#include "schedule/planners.h"
#include "schedule/slicing.h"

namespace farandole {

Schedule plan_between_two(const Shape& shape) {
  const bool sends = shape.rank == shape.root;
  const int other = 1 - shape.rank;
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const Slice data = lane_data(shape, l);
    Lane lane;
    if (sends)
      add(lane, {.to = other, .send = data});
    else
      add(lane, {.from = other, .recv = in(Space::output, data)});
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

}  // namespace farandole
