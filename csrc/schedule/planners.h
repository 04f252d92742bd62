// The table of planners, and the ways to pick from it.
#pragma once

#include <string_view>
#include <vector>

#include "schedule/schedule.h"

namespace farandole {

/// Throws Error(invalid_argument) when the shape contradicts itself or asks for a form that
/// `collective` does not have. Every row's `plan` begins with it.
void require_valid(Collective collective, const Shape& shape);

/// Every rank's schedule; `world.rank` does not count.
std::vector<Schedule> plan_world(const Planner& planner, Shape world);

/// The row, or null when `collective` has no planner of that name.
const Planner* find_planner(Collective collective, std::string_view name);

/// Whether `planner` fits the shape and its order is good enough for the level.
bool is_allowed(const Planner& planner, const Shape& shape, Determinism level);

/// The row somebody insists on. Throws Error(invalid_argument) when it is unknown, does not fit or
/// is below the level; the message says which, and lists those that are allowed.
const Planner& require_planner(Collective collective, std::string_view name, const Shape& shape,
                               Determinism level);

/// The cheapest allowed row by the default model, in seconds:
///
///   kSecondsPerRound * rounds + kSecondsPerMessage * messages +
///   bytes_per_element * (kSecondsPerByte * bytes + kSecondsPerFoldedByte * folds)
///
/// Pure: equal arguments (`shape.rank` does not count) give an equal answer on every rank.
const Planner& choose_planner(Collective collective, const Shape& shape, size_t bytes_per_element,
                              Determinism level);

double predicted_seconds(const Cost& cost, size_t bytes_per_element);

// Orders of magnitude for processes on a few hosts, good enough to tell latency from bandwidth; a
// tuning table measured on the machine replaces them. Host memory: a hand-over between polling
// ranks through a byte channel, a step whose message is there already, a stream copied in and out
// of the channel, a fold bound by memory.
inline constexpr double kSecondsPerRound = 5e-6;
inline constexpr double kSecondsPerMessage = 5e-7;
inline constexpr double kSecondsPerByte = 1 / 5e9;
inline constexpr double kSecondsPerFoldedByte = 1 / 10e9;

}  // namespace farandole
