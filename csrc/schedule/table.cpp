// The table of planners: one row for each way to run a collective.
#include "schedule/algorithms.h"
#include "schedule/hosts.h"
#include "schedule/leaves.h"
#include "schedule/planners.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// A single rank has no peer, but its data are scaled as in any other world.
Schedule plan_alone(Collective collective, const Shape& shape) {
  const bool scales = folds(collective);
  const Slice data{Space::input, 0, sizes_of(collective, shape).input};
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const Slice mine = part(data, shape.lanes, l);
    Lane lane;
    add(lane, {.to = shape.rank,
               .send = mine,
               .from = shape.rank,
               .recv = in(Space::output, mine),
               .leaf_arrived = scales,
               .finish = scales});
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// The door to a planner: what they all have in common. Planners know one leaf on each rank, but
/// for those of any_leaves.
template <Collective collective, Schedule (*algorithm)(const Shape&)>
Schedule plan(const Shape& shape) {
  require_valid(collective, shape);
  Shape plain = shape;
  plain.leaves = {};
  Schedule schedule = shape.size == 1 ? plan_alone(collective, plain) : algorithm(plain);
  return shape.leaves.empty() ? schedule
                              : fold_leaves_first(collective, shape, std::move(schedule));
}

template <Collective collective, Schedule (*algorithm)(const Shape&)>
Schedule plan_any_leaves(const Shape& shape) {
  return shape.size == 1 ? plan<collective, algorithm>(shape)
                         : (require_valid(collective, shape), algorithm(shape));
}

template <Collective collective, Cost (*algorithm)(const Shape&)>
Cost cost(const Shape& shape) {
  require_valid(collective, shape);
  if (shape.size > 1) return algorithm(shape);
  return {.folds = static_cast<double>(sizes_of(collective, shape).input)};
}

bool any_leaves(const Shape&) { return true; }
Order own_order(const Shape& shape) {
  return shape.count == 0 ? Order::canonical : Order::same_on_all_ranks;
}
bool levels(const Shape& shape) { return has_levels(shape) && has_aligned_leaves(shape); }
/// Otherwise `hierarchical` does the same, in canonical order.
bool scattered_levels(const Shape& shape) { return levels(shape) && !are_nodes(hosts_of(shape)); }
bool even_shares(const Shape& shape) { return shape.counts.empty(); }
Order canonical(const Shape&) { return Order::canonical; }

using enum Collective;

constexpr Planner kPlanners[] = {
    {"direct", all_reduce,
     "Everybody sends part r to rank r, who folds all of them in canonical order and sends the "
     "result to everybody (pairwise exchange of Thakur, Rabenseifner and Gropp 2005).",
     any_leaves, canonical, cost<all_reduce, direct_all_reduce_cost>,
     plan_any_leaves<all_reduce, direct_all_reduce>},
    {"binomial", all_reduce,
     "Up one binomial tree to rank 0, nearest child first, and down again, with segments going up "
     "and down at once.",
     has_aligned_leaves, canonical, cost<all_reduce, binomial_all_reduce_cost>,
     plan<all_reduce, binomial_all_reduce>},
    {"halving_doubling", all_reduce,
     "Neighbours at distance 1, 2, 4 … halve the data between them as they fold it, blocks that "
     "make up the size cross over, and all of it goes backwards (Rabenseifner 2004).",
     has_aligned_leaves, canonical, cost<all_reduce, halving_doubling_all_reduce_cost>,
     plan<all_reduce, halving_doubling_all_reduce>},
    {"doubling", all_reduce,
     "Pairs at distance 1, 2, 4 … exchange their totals and both fold them (Hockney and Jesshope "
     "1988).",
     has_aligned_leaves, canonical, cost<all_reduce, doubling_all_reduce_cost>,
     plan<all_reduce, doubling_all_reduce>},
    {"ring", all_reduce,
     "Each part goes around once while every rank folds its own into it, and once more, complete "
     "(Patarasuk and Yuan 2009).",
     has_aligned_leaves, ring_order, cost<all_reduce, ring_all_reduce_cost>,
     plan<all_reduce, ring_all_reduce>},
    {"double_tree", all_reduce,
     "Two binary trees, each up and down with half of the data in segments, in which the inner "
     "ranks of one are the leaves of the other (Sanders, Speck and Träff 2009).",
     has_aligned_leaves, double_tree_order, cost<all_reduce, double_tree_all_reduce_cost>,
     plan<all_reduce, double_tree_all_reduce>},
    {"hierarchical", all_reduce,
     "Each host's ranks fold a part each, exchange it with that part's ranks on the other hosts, "
     "and spread the result, in canonical order (two levels of Jia et al. 2018).",
     levels, canonical, cost<all_reduce, hierarchical_all_reduce_cost>,
     plan<all_reduce, hierarchical_all_reduce>},
    {"whole_host", all_reduce,
     "As hierarchical, but all of a host's ranks are folded together, whatever their numbers, so "
     "that its link carries everything once where they are no neighbours.",
     scattered_levels, own_order, cost<all_reduce, hierarchical_all_reduce_cost>,
     plan<all_reduce, whole_host_all_reduce>},

    {"direct", reduce_scatter,
     "Everybody sends part r to rank r, who folds all of them in canonical order (pairwise "
     "exchange of Thakur, Rabenseifner and Gropp 2005).",
     any_leaves, canonical, cost<reduce_scatter, direct_reduce_scatter_cost>,
     plan_any_leaves<reduce_scatter, direct_reduce_scatter>},
    {"binomial", reduce_scatter,
     "Up a binomial tree to rank 0, nearest child first; down again every child is sent the parts "
     "of its subtree.",
     has_aligned_leaves, canonical, cost<reduce_scatter, binomial_reduce_scatter_cost>,
     plan<reduce_scatter, binomial_reduce_scatter>},
    {"ring", reduce_scatter,
     "Each part goes around once, to its owner, while every rank folds its own into it (Patarasuk "
     "and Yuan 2009).",
     has_aligned_leaves, ring_order, cost<reduce_scatter, ring_reduce_scatter_cost>,
     plan<reduce_scatter, ring_reduce_scatter>},

    {"direct", all_gather, "Every rank sends its part to every other, one at a time.",
     has_aligned_leaves, canonical, cost<all_gather, direct_all_gather_cost>,
     plan<all_gather, direct_all_gather>},
    {"bruck", all_gather,
     "At distance 1, 2, 4 … every rank passes on all parts that it has, so they double each time "
     "(Bruck et al. 1997).",
     has_aligned_leaves, canonical, cost<all_gather, bruck_all_gather_cost>,
     plan<all_gather, bruck_all_gather>},
    {"ring", all_gather, "Each part goes around once, from neighbour to neighbour.",
     has_aligned_leaves, canonical, cost<all_gather, ring_all_gather_cost>,
     plan<all_gather, ring_all_gather>},

    {"binomial", broadcast,
     "Down a binomial tree from the root; a rank passes on one segment while it receives the "
     "next.",
     has_aligned_leaves, canonical, cost<broadcast, binomial_broadcast_cost>,
     plan<broadcast, binomial_broadcast>},
    {"scatter_ring", broadcast,
     "The root scatters parts down a binomial tree, and a ring passes around what is missing (van "
     "de Geijn: Barnett et al. 1994).",
     has_aligned_leaves, canonical, cost<broadcast, scatter_ring_broadcast_cost>,
     plan<broadcast, scatter_ring_broadcast>},

    {"direct", reduce,
     "Everybody sends part r to rank r, who folds all of them in canonical order and sends the "
     "result to the root.",
     any_leaves, canonical, cost<reduce, direct_reduce_cost>,
     plan_any_leaves<reduce, direct_reduce>},
    {"binomial", reduce,
     "Up the canonical fold tree, pulled up at the root; a rank passes on one segment while it "
     "receives the next.",
     has_aligned_leaves, canonical, cost<reduce, binomial_reduce_cost>,
     plan<reduce, binomial_reduce>},

    {"direct", gather, "Every rank sends its share to the root, who takes one after the other.",
     has_aligned_leaves, canonical, cost<gather, direct_gather_cost>, plan<gather, direct_gather>},
    {"binomial", gather,
     "Up a binomial tree to the root; every rank passes on the shares of its subtree in one "
     "message.",
     has_aligned_leaves, canonical, cost<gather, binomial_gather_cost>,
     plan<gather, binomial_gather>},

    {"direct", scatter, "The root sends every rank its share, one after the other.",
     has_aligned_leaves, canonical, cost<scatter, direct_scatter_cost>,
     plan<scatter, direct_scatter>},
    {"binomial", scatter,
     "Down a binomial tree from the root; every rank is sent the shares of its subtree in one "
     "message.",
     has_aligned_leaves, canonical, cost<scatter, binomial_scatter_cost>,
     plan<scatter, binomial_scatter>},

    {"direct", all_to_all,
     "In turn k every rank sends a block k places to the right and receives one from k to the left "
     "(pairwise exchange of Thakur, Rabenseifner and Gropp 2005).",
     has_aligned_leaves, canonical, cost<all_to_all, direct_all_to_all_cost>,
     plan<all_to_all, direct_all_to_all>},
    {"bruck", all_to_all,
     "At distance 1, 2, 4 … every rank passes on, in one message, the blocks whose way has that "
     "binary digit (Bruck et al. 1997).",
     even_shares, canonical, cost<all_to_all, bruck_all_to_all_cost>,
     plan<all_to_all, bruck_all_to_all>},

    {"dissemination", barrier,
     "At distance 1, 2, 4 … every rank tells the one to its right that it and all it has heard of "
     "have come (Hensgen, Finkel and Manber 1988).",
     has_aligned_leaves, canonical, cost<barrier, dissemination_barrier_cost>,
     plan<barrier, dissemination_barrier>},
};

}  // namespace

std::span<const Planner> planners() { return kPlanners; }

}  // namespace farandole
