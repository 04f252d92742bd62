#include "backends/explain.h"

#include "backends/schedule_backend.h"
#include "base/error.h"
#include "schedule/routes.h"

namespace farandole {
namespace {

std::string words_for(Refusal refusal, const PathRow& row, Collective kind) {
  switch (refusal) {
    case Refusal::none:
      return "";
    case Refusal::collective:
      return "does not run " + std::string(name_of(kind));
    case Refusal::too_long:
      return "takes at most " + std::to_string(row.most_bytes) + " bytes";
    case Refusal::memory:
      return "needs input and output in memory that all ranks map (farandole.allocate)";
    case Refusal::by_address:
      return "reaches other ranks' memory, which is forbidden or found to be slower";
    case Refusal::demanded:
      return "copies, where ranks were told to reach each other's memory (FARANDOLE_CMA=1)";
    case Refusal::alone:
      return "needs more than one rank";
    case Refusal::too_short:
      return "is worth it from " + std::to_string(kHandedInBytes) + " bytes on";
    case Refusal::too_late:
      return "lines are under way before ranks know where buffers lie";
  }
  return "";
}

Shape shape_of(const Question& q) {
  const Split split = default_split(q.count * size_of(q.dtype));
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
  const size_t input = longest_input(q.kind, shape_of(q)) * size_of(q.dtype);
  const PathQuestion question{q.kind, input, q.size, q.shared, q.foreign, q.demanded};
  const PathKind choice = choose_path(question, table);
  if (choice == PathKind::barrier) return {{"shm_direct", "barrier", std::nullopt, "", true}};
  for (const PathRow& row : path_table()) {
    const Refusal no = refusal(row, question, table);
    all.push_back({"shm_direct", std::string(row.name),
                   no == Refusal::collective
                       ? std::nullopt
                       : std::optional(predicted_seconds(row, question, table)),
                   words_for(no, row, q.kind), row.path == choice});
  }
  return all;
}

}  // namespace

std::vector<Candidate> explain(const Question& q, const TuningTable& table) {
  const Shape shape = shape_of(q);
  require_valid(q.kind, shape);
  if (q.kind == Collective::send || q.kind == Collective::recv)
    throw Error(ErrorCode::invalid_argument,
                std::string(name_of(q.kind)) + " is no collective, and always goes one way");
  const size_t item = q.kind == Collective::barrier ? 1 : size_of(q.dtype);
  std::vector<Candidate> all = paths(q, table);
  for (const Planner& planner : planners()) {
    if (planner.collective != q.kind) continue;
    std::string no = words_for(planner, shape, q.level);
    const bool fits = planner.fits(shape);
    if (no.empty()) no = "only where a rank is out of reach of paths over shared memory";
    all.push_back(
        {"schedule", std::string(planner.name),
         fits ? std::optional(predicted_seconds(planner.cost(shape), item, table)) : std::nullopt,
         std::move(no), false});
  }
  return all;
}

}  // namespace farandole
