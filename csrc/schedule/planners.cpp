#include "schedule/planners.h"

#include <limits>
#include <string>

#include "base/error.h"
#include "schedule/slicing.h"
#include "schedule/traffic.h"

namespace farandole {
namespace {

Order least_order(Determinism level) {
  return level == Determinism::canonical ? Order::canonical : Order::same_on_all_ranks;
}

std::string allowed_names(Collective collective, const Shape& shape, Determinism level) {
  std::string names;
  for (const Planner& planner : planners())
    if (planner.collective == collective && is_allowed(planner, shape, level))
      names += (names.empty() ? "" : ", ") + std::string(planner.name);
  return names.empty() ? "none" : names;
}

Error refusal(Collective collective, const Shape& shape, Determinism level,
              const std::string& why) {
  const std::string operation{name_of(collective)};
  Context where;
  where.operation = operation;
  return {ErrorCode::invalid_argument, why, std::move(where),
          "allowed at level " + std::string(name_of(level)) + " for " + operation + " over " +
              std::to_string(shape.size) + " ranks: " + allowed_names(collective, shape, level)};
}

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::invalid_argument, why); }

void require(bool holds, const std::string& otherwise) {
  if (!holds) refuse(otherwise);
}

void require_rank(const char* what, int value, int size) {
  if (value < 0 || value >= size)
    refuse(std::string(what) + " " + std::to_string(value) + " is not one of " +
           std::to_string(size) + " ranks");
}

void require_counts(Collective collective, const Shape& shape) {
  const std::string operation{name_of(collective)};
  const size_t expected = counts_of(collective, shape.size);
  require(expected > 0, operation + " has no uneven form: all ranks have the same count");
  require(
      shape.counts.size() == expected,
      operation + " over " + std::to_string(shape.size) + " ranks takes " +
          std::to_string(expected) + " counts" +
          (collective == Collective::all_to_all ? ", from * size + to," : ", one for each rank,") +
          " not " + std::to_string(shape.counts.size()));
  size_t total = 0;
  for (const size_t count : shape.counts)
    require(!__builtin_add_overflow(total, count, &total),
            "the counts of " + operation + " add up to more than any memory holds");
}

void require_leaves(Collective collective, const Shape& shape) {
  const std::string operation{name_of(collective)};
  require(folds(collective), operation + " folds nothing, so its ranks have no leaves");
  require(std::ssize(shape.leaves) == shape.size, "leaves are told for " +
                                                      std::to_string(shape.leaves.size()) + " of " +
                                                      std::to_string(shape.size) + " ranks");
  for (int r = 0; r < shape.size; ++r)
    require(shape.leaves[static_cast<size_t>(r)] >= 0,
            "rank " + std::to_string(r) + " cannot hold " +
                std::to_string(shape.leaves[static_cast<size_t>(r)]) + " leaves");
  require(leaf_count(shape) > 0, operation + " of no leaves at all has no result");
}

}  // namespace

/// Called for every operation: text is made only for what does not hold.
void require_valid(Collective collective, const Shape& shape) {
  if (shape.size < 1) refuse("a group has at least one rank, not " + std::to_string(shape.size));
  require_rank("rank", shape.rank, shape.size);
  require_rank("root", shape.root, shape.size);
  if (shape.lanes < 1)
    refuse("a schedule has at least one lane, not " + std::to_string(shape.lanes));
  if (shape.segments < 1)
    refuse("data is cut into at least one segment, not " + std::to_string(shape.segments));
  if (!shape.counts.empty()) require_counts(collective, shape);
  if (!shape.leaves.empty()) require_leaves(collective, shape);
  if (!shape.host_of.empty() && std::ssize(shape.host_of) != shape.size)
    refuse("hosts are told for " + std::to_string(shape.host_of.size()) + " of " +
           std::to_string(shape.size) + " ranks");
}

std::vector<Schedule> plan_world(const Planner& planner, Shape world) {
  std::vector<Schedule> by_rank;
  for (world.rank = 0; world.rank < world.size; ++world.rank)
    by_rank.push_back(planner.plan(world));
  return by_rank;
}

const Planner* find_planner(Collective collective, std::string_view name) {
  for (const Planner& planner : planners())
    if (planner.collective == collective && planner.name == name) return &planner;
  return nullptr;
}

bool is_allowed(const Planner& planner, const Shape& shape, Determinism level) {
  return planner.fits(shape) && planner.order(shape) >= least_order(level);
}

const Planner& require_planner(Collective collective, std::string_view name, const Shape& shape,
                               Determinism level) {
  require_valid(collective, shape);
  const Planner* planner = find_planner(collective, name);
  const std::string what = "algorithm '" + std::string(name) + "'";
  const std::string where =
      std::string(name_of(collective)) + " over " + std::to_string(shape.size) + " ranks";
  if (planner == nullptr)
    throw refusal(collective, shape, level,
                  what + " does not exist for " + std::string(name_of(collective)));
  if (!planner->fits(shape))
    throw refusal(collective, shape, level, what + " does not fit " + where);
  if (!is_allowed(*planner, shape, level))
    throw refusal(collective, shape, level,
                  what + " folds in an order that is only " +
                      std::string(name_of(planner->order(shape))) + " for " + where +
                      ", below level " + std::string(name_of(level)));
  return *planner;
}

double predicted_seconds(const Cost& cost, size_t bytes_per_element, const ChannelCosts& costs) {
  return costs.round * cost.rounds + costs.inner_round * cost.inner_rounds +
         costs.message * cost.messages +
         static_cast<double>(bytes_per_element) *
             (costs.byte * cost.bytes + costs.inner_byte * cost.inner_bytes +
              costs.folded_byte * cost.folds);
}

/// The rows know nothing of hosts, but for those that have levels: all their rounds count as if
/// they went between hosts, and all their bytes as if they stayed on one; then the link's are
/// added.
Cost cost_of(const Planner& planner, const Shape& shape) {
  Cost cost = planner.cost(shape);
  if (shape.host_of.empty()) return cost;
  if (cost.inner_bytes == 0) cost.inner_bytes = cost.bytes;
  cost.bytes = static_cast<double>(link_traffic(planner, shape));
  return cost;
}

const Planner& choose_planner(Collective collective, const Shape& shape, size_t bytes_per_element,
                              Determinism level, const ChannelCosts& costs) {
  require_valid(collective, shape);
  const Planner* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Planner& planner : planners()) {
    if (planner.collective != collective || !is_allowed(planner, shape, level)) continue;
    const double seconds = predicted_seconds(cost_of(planner, shape), bytes_per_element, costs);
    if (seconds < least) {
      least = seconds;
      best = &planner;
    }
  }
  if (best == nullptr)
    throw refusal(collective, shape, level,
                  "no algorithm for " + std::string(name_of(collective)) + " at this level");
  return *best;
}

}  // namespace farandole
