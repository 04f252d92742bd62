#include "schedule/planners.h"

#include <limits>
#include <string>

#include "base/error.h"

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

Error refusal(Collective collective, const Shape& shape, Determinism level, std::string why) {
  const std::string operation{name_of(collective)};
  Context where;
  where.operation = operation;
  return {ErrorCode::invalid_argument, std::move(why), std::move(where),
          "allowed at level " + std::string(name_of(level)) + " for " + operation + " over " +
              std::to_string(shape.size) + " ranks: " + allowed_names(collective, shape, level)};
}

}  // namespace

void require_valid(const Shape& shape) {
  const auto require = [](bool holds, const std::string& otherwise) {
    if (!holds) throw Error(ErrorCode::invalid_argument, otherwise);
  };
  const auto within = [](const char* what, int value, int size) {
    return std::string(what) + " " + std::to_string(value) + " is not one of " +
           std::to_string(size) + " ranks";
  };
  require(shape.size >= 1, "a group has at least one rank, not " + std::to_string(shape.size));
  require(shape.rank >= 0 && shape.rank < shape.size, within("rank", shape.rank, shape.size));
  require(shape.root >= 0 && shape.root < shape.size, within("root", shape.root, shape.size));
  require(shape.lanes >= 1, "a schedule has at least one lane, not " + std::to_string(shape.lanes));
  require(shape.segments >= 1,
          "data is cut into at least one segment, not " + std::to_string(shape.segments));
  require(shape.leaves.empty(), "several leaves on a rank are not supported by any planner");
  require(shape.counts.empty(),
          "counts that differ between ranks are not supported by any planner");
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
  require_valid(shape);
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

double predicted_seconds(const Cost& cost, size_t bytes_per_element) {
  return kSecondsPerRound * cost.rounds +
         static_cast<double>(bytes_per_element) *
             (kSecondsPerByte * cost.bytes + kSecondsPerFoldedByte * cost.folds);
}

const Planner& choose_planner(Collective collective, const Shape& shape, size_t bytes_per_element,
                              Determinism level) {
  require_valid(shape);
  const Planner* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Planner& planner : planners()) {
    if (planner.collective != collective || !is_allowed(planner, shape, level)) continue;
    const double seconds = predicted_seconds(planner.cost(shape), bytes_per_element);
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
