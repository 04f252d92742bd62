// The table of planners, and the ways to pick from it.
#pragma once

#include <string_view>
#include <vector>

#include "schedule/channel_costs.h"
#include "schedule/schedule.h"

namespace farandole {

/// Throws Error(invalid_argument) when the shape contradicts itself or asks for a form that
/// `collective` does not have. Every row's `plan` begins with it.
void require_valid(Collective collective, const Shape& shape);

/// Every rank's schedule; `world.rank` does not count.
std::vector<Schedule> plan_world(const Planner& planner, Shape world);

/// A transfer between two ranks: all data go from the root to the other rank.
Schedule plan_between_two(const Shape& shape);

/// The row, or null when `collective` has no planner of that name.
const Planner* find_planner(Collective collective, std::string_view name);

/// Whether `planner` fits the shape and its order is good enough for the level.
bool is_allowed(const Planner& planner, const Shape& shape, Determinism level);

/// The row that a caller names. Throws Error(invalid_argument) when it is unknown, does not fit or
/// is below the level; the message says which, and lists those that are allowed.
const Planner& require_planner(Collective collective, std::string_view name, const Shape& shape,
                               Determinism level);

/// The time that the model predicts for a planner, in seconds:
///
///   round * rounds + inner_round * inner_rounds + message * messages +
///   bytes_per_element * (byte * bytes + inner_byte * inner_bytes + folded_byte * folds)
double predicted_seconds(const Cost& cost, size_t bytes_per_element,
                         const ChannelCosts& costs = {});

/// The planner's cost; where the shape has several hosts, with what their busiest link carries.
Cost cost_of(const Planner& planner, const Shape& shape);

/// The cheapest allowed row by that model; of equal ones, the first. Pure: equal arguments
/// (`shape.rank` does not count) give an equal answer on every rank.
const Planner& choose_planner(Collective collective, const Shape& shape, size_t bytes_per_element,
                              Determinism level, const ChannelCosts& costs = {});

}  // namespace farandole
