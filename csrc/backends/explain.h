// Explains which path or planner would run an operation, and why, by the deciding functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backends/tuning.h"
#include "base/dtype.h"
#include "schedule/planners.h"

namespace farandole {

struct Question {
  Collective kind = Collective::all_reduce;
  size_t count = 0;  // the shape's: what one rank gives (of scatter: gets; of all_to_all: a block)
  DType dtype = DType::float32;
  int size = 1;           // ranks, all on one host
  bool shared = false;    // input and output lie in memory that all ranks map
  bool foreign = false;   // ranks may reach each other's memory by address, and found it faster
  bool demanded = false;  // and were told to do so anyway
  Determinism level = Determinism::canonical;
  std::string transport = "auto";  // FARANDOLE_TRANSPORT
};

struct Candidate {
  std::string backend;
  std::string name;
  std::optional<double> seconds;  // as the model predicts; none where it says nothing
  std::string refusal;            // why it is not considered; empty: it is
  bool chosen = false;
};

/// Every path and planner of the collective, paths first, then MPI's own all-reduce; exactly one of
/// them is chosen. Pure, and made of the functions that decide when an operation runs: choose_path
/// and choose_planner. Throws Error(invalid_argument) for a question that makes no sense.
std::vector<Candidate> explain(const Question& question, const TuningTable& table);

}  // namespace farandole
