// Faults put into schedules on purpose: every proof has to notice them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "schedule/schedule.h"

namespace farandole {

/// A single wrong thing in one step. Returns false where it makes no sense.
struct Mutation {
  std::string_view name;
  bool (*apply)(Schedule&, size_t lane, size_t step, const Shape&);
};

std::span<const Mutation> mutations();

struct Mutants {
  size_t made = 0;
  std::vector<std::string> survivors;  // neither a problem nor a lesser order
  std::vector<std::string> problems;   // each kind once, without its place
};

/// Puts one fault into every step of every rank in turn and proves each of these worlds.
/// `world.rank` is ignored.
Mutants mutate(const Planner& planner, Shape world, const Mutation& mutation);

}  // namespace farandole
