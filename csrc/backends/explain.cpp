#include "backends/explain.h"

#include "backends/mesh.h"
#include "backends/mpi_all_reduce.h"
#include "backends/refused_paths.h"
#include "backends/schedule_backend.h"
#include "base/error.h"
#include "schedule/routes.h"

namespace farandole {
namespace {

Shape shape_of(const Question& q, const TuningTable& table) {
  const Split split = default_split(q.count * size_of(q.dtype), costs_over(q.transport, table));
  return {.size = q.size, .count = q.count, .lanes = split.lanes, .segments = split.segments};
}

std::string words_for(const Planner& planner, const Shape& shape, Determinism level) {
  if (!planner.fits(shape)) return "does not fit this shape";
  if (!is_allowed(planner, shape, level))
    return "folds in an order that is only " + std::string(name_of(planner.order(shape))) +
           ", below level " + std::string(name_of(level));
  return "";
}

std::vector<Candidate> paths(const Question& q, const TuningTable& table) {
  std::vector<Candidate> all;
  const size_t input = longest_input(q.kind, shape_of(q, table)) * size_of(q.dtype);
  const PathQuestion question{q.kind, input, q.size, q.shared, q.foreign, q.demanded};
  const PathRow* choice = choose_path(question, table);
  const bool run = runs_paths(q.transport);
  if (choice == nullptr && run) return {{"shm_direct", "barrier", std::nullopt, "", true}};
  for (const PathRow* row : path_table()) {
    const bool runs = fits(*row, q.kind, 0);
    all.push_back({"shm_direct", std::string(row->name),
                   runs ? std::optional(predicted_seconds(*row, question, table)) : std::nullopt,
                   run ? why_not(*row, question, table) : RefusedPaths::why_not_paths(q.transport),
                   run && row == choice});
  }
  return all;
}

std::vector<Candidate> schedules(const Question& q, const TuningTable& table) {
  const Shape shape = shape_of(q, table);
  const size_t item = q.kind == Collective::barrier ? 1 : size_of(q.dtype);
  const ChannelCosts costs = costs_over(q.transport, table);
  const Planner* choice =
      runs_paths(q.transport) ? nullptr : &choose_planner(q.kind, shape, item, q.level, costs);
  std::vector<Candidate> all;
  for (const Planner& planner : planners()) {
    if (planner.collective != q.kind) continue;
    std::string no = words_for(planner, shape, q.level);
    if (no.empty() && choice == nullptr)
      no = "only where a rank is out of reach of paths over shared memory";
    const auto seconds =
        planner.fits(shape) ? std::optional(predicted_seconds(cost_of(planner, shape), item, costs))
                            : std::nullopt;
    all.push_back(
        {"schedule", std::string(planner.name), seconds, std::move(no), &planner == choice});
  }
  return all;
}

/// MPI's own all-reduce. It is never chosen among the ranks of one host.
Candidate by_mpi(const Question& q, const TuningTable& table) {
  std::string no = "data do not go over MPI (FARANDOLE_TRANSPORT=mpi)";
  if (q.transport == "mpi") no = why_not_by_mpi({.kind = q.kind}, q.dtype, q.level, q.count);
  if (no.empty()) no = "is chosen between hosts alone, or by name";
  const size_t bytes = q.count * size_of(q.dtype);
  const auto seconds = table.mpi.is_measured()
                           ? std::optional(predicted_seconds(table.mpi, q.size, bytes))
                           : std::nullopt;
  return {std::string(MpiAllReduce::kName), std::string(MpiAllReduce::kName), seconds,
          std::move(no), false};
}

}  // namespace

std::vector<Candidate> explain(const Question& q, const TuningTable& table) {
  const Shape shape = shape_of(q, table);
  require_valid(q.kind, shape);
  if (is_between_two(q.kind))
    throw Error(ErrorCode::invalid_argument,
                std::string(name_of(q.kind)) + " is no collective, and always goes one way");
  std::vector<Candidate> all = paths(q, table);
  for (Candidate& candidate : schedules(q, table)) all.push_back(std::move(candidate));
  if (q.kind == Collective::all_reduce) all.push_back(by_mpi(q, table));
  return all;
}

}  // namespace farandole
