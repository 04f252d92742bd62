// The doors of the algorithm files, for the table in table.cpp. Sizes are at least two here:
// a single rank is dealt with in one place, there.
#pragma once

#include "schedule/schedule.h"

namespace farandole {

Schedule ring_all_reduce(const Shape& shape);
Schedule ring_reduce_scatter(const Shape& shape);
Schedule ring_all_gather(const Shape& shape);
Cost ring_all_reduce_cost(const Shape& shape);
Cost ring_reduce_scatter_cost(const Shape& shape);
Cost ring_all_gather_cost(const Shape& shape);
Order ring_order(const Shape& shape);

Schedule direct_all_reduce(const Shape& shape);
Schedule direct_reduce(const Shape& shape);
Schedule direct_reduce_scatter(const Shape& shape);
Schedule direct_all_gather(const Shape& shape);
Cost direct_all_reduce_cost(const Shape& shape);
Cost direct_reduce_cost(const Shape& shape);
Cost direct_reduce_scatter_cost(const Shape& shape);
Cost direct_all_gather_cost(const Shape& shape);

Schedule hierarchical_all_reduce(const Shape& shape);
Schedule whole_host_all_reduce(const Shape& shape);
Cost hierarchical_all_reduce_cost(const Shape& shape);

Schedule binomial_all_reduce(const Shape& shape);
Schedule binomial_reduce(const Shape& shape);
Schedule binomial_reduce_scatter(const Shape& shape);
Schedule binomial_broadcast(const Shape& shape);
Cost binomial_all_reduce_cost(const Shape& shape);
Cost binomial_reduce_cost(const Shape& shape);
Cost binomial_reduce_scatter_cost(const Shape& shape);
Cost binomial_broadcast_cost(const Shape& shape);

Schedule halving_doubling_all_reduce(const Shape& shape);
Cost halving_doubling_all_reduce_cost(const Shape& shape);

Schedule doubling_all_reduce(const Shape& shape);
Cost doubling_all_reduce_cost(const Shape& shape);

Schedule double_tree_all_reduce(const Shape& shape);
Cost double_tree_all_reduce_cost(const Shape& shape);
Order double_tree_order(const Shape& shape);

Schedule direct_gather(const Shape& shape);
Schedule direct_scatter(const Shape& shape);
Schedule binomial_gather(const Shape& shape);
Schedule binomial_scatter(const Shape& shape);
Cost direct_gather_cost(const Shape& shape);
Cost direct_scatter_cost(const Shape& shape);
Cost binomial_gather_cost(const Shape& shape);
Cost binomial_scatter_cost(const Shape& shape);

Schedule direct_all_to_all(const Shape& shape);
Schedule bruck_all_to_all(const Shape& shape);
Cost direct_all_to_all_cost(const Shape& shape);
Cost bruck_all_to_all_cost(const Shape& shape);

Schedule bruck_all_gather(const Shape& shape);
Schedule scatter_ring_broadcast(const Shape& shape);
Schedule dissemination_barrier(const Shape& shape);
Cost bruck_all_gather_cost(const Shape& shape);
Cost scatter_ring_broadcast_cost(const Shape& shape);
Cost dissemination_barrier_cost(const Shape& shape);

}  // namespace farandole
