#include "backends/mpi_all_reduce.h"

#include <algorithm>

#include "backends/paths.h"
#include "base/error.h"

namespace farandole {
namespace {

constexpr size_t kMostAnswers = 1024;
constexpr size_t kPiece = 128 * 1024;  // bytes scaled between two looks at the clock

}  // namespace

std::string why_not_by_mpi(const CollectiveSpec& spec, DType dtype, Determinism level,
                           size_t count) {
  if (spec.kind != Collective::all_reduce)
    return "it runs all_reduce, not " + std::string(name_of(spec.kind));
  if (level != Determinism::fast)
    return "MPI folds in an order of its own, and level '" + std::string(name_of(level)) +
           "' promises bits";
  const DTypeKind kind = row(dtype).kind;
  if (kind == DTypeKind::half || kind == DTypeKind::boolean)
    return "MPI has no " + std::string(name_of(dtype));
  if (kind == DTypeKind::floating && (spec.op == ReduceOp::min || spec.op == ReduceOp::max))
    return "MPI does not say what becomes of a NaN in a " + std::string(name_of(spec.op)) + " of " +
           std::string(name_of(dtype));
  if (count > MpiPort::kMostReduced)
    return "it takes at most " + std::to_string(MpiPort::kMostReduced) + " elements";
  return "";
}

// ---- what it runs ----

std::string MpiAllReduce::why_not(const Operation& o) const {
  if (!mpi_.why_not.empty()) return mpi_.why_not;
  if (std::string why = why_not_by_mpi(o, o.input.dtype, o.level, o.count); !why.empty())
    return why;
  if (mpi_.port->folds(o.input.dtype, o.op)) return "";
  return "this MPI has no " + std::string(name_of(o.op)) + " of " +
         std::string(name_of(o.input.dtype));
}

bool MpiAllReduce::can_run(const Operation& o) const {
  return o.algorithm == kName ? why_not(o).empty() : schedules_->can_run(o);
}

void MpiAllReduce::refuse(const Operation& o) const {
  if (o.algorithm != kName) return schedules_->refuse(o);
  throw Error(ErrorCode::invalid_argument, "algorithm 'mpi' cannot run this: " + why_not(o), {},
              "use another algorithm, or level='fast' where that is what is missing");
}

std::string MpiAllReduce::ways_for(const Operation& o) const {
  return schedules_->ways_for(o) + (why_not(o).empty() ? "; mpi" : "");
}

/// Asked for the same buckets again and again, while a schedule's cost takes long to work out.
bool MpiAllReduce::is_quicker(const Operation& o) {
  if (!mpi_.costs || o.level != Determinism::fast || !o.algorithm.empty() || o.count == 0 ||
      !why_not(o).empty())
    return false;
  if (quicker_.size() > kMostAnswers) quicker_.clear();
  const auto [known, is_new] = quicker_.try_emplace({o.count, size_of(o.input.dtype)}, false);
  if (is_new)
    known->second = predicted_seconds(*mpi_.costs, size_, o.input.bytes()) <
                    kWorthLeaving * schedules_->predicted_seconds(o);
  return known->second;
}

// ---- running it ----

void MpiAllReduce::start(const Operation& o, uint32_t sequence) {
  by_mpi_ = o.algorithm == kName || is_quicker(o);
  if (!by_mpi_) return schedules_->start(o, sequence);
  operation_ = &o;
  scales_ = scales_for(o.input.dtype, o.op, o.prescale, o.postscale, size_);
  stage_ = scales_.leaf.is_identity() ? Stage::folding : Stage::leaves;
  scaled_ = 0;
  reduction_ = {.communicator = mpi_.communicator,
                .input = stage_ == Stage::leaves ? o.output.data : o.input.data,
                .output = o.output.data,
                .count = o.count,
                .dtype = o.input.dtype,
                .op = o.op};
}

Progress MpiAllReduce::poll(TimePoint until) {
  if (!by_mpi_) return schedules_->poll(until);
  if (operation_ == nullptr) return Progress::idle;
  bool moved = false;
  do {
    const Progress progress = advance();
    if (progress == Progress::finished) return progress;
    if (progress == Progress::idle) break;
    moved = true;
  } while (!has_come(until));
  return moved ? Progress::moved : Progress::idle;
}

Progress MpiAllReduce::advance() {
  const Operation& o = *operation_;
  switch (stage_) {
    case Stage::leaves:
      if (!scale_piece(o.input.data, scales_.leaf)) stage_ = Stage::folding;
      return Progress::moved;
    case Stage::folding:
      if (o.count > 0 && !mpi_.port->reduce(reduction_)) return Progress::idle;
      stage_ = Stage::finishing;
      scaled_ = scales_.finish.is_identity() ? o.count : 0;
      return Progress::moved;
    case Stage::finishing:
      if (scale_piece(o.output.data, scales_.finish)) return Progress::moved;
      operation_ = nullptr;
      return Progress::finished;
  }
  return Progress::idle;
}

/// Into the output. False when nothing was left.
bool MpiAllReduce::scale_piece(const std::byte* from, const Scale& by) {
  const Operation& o = *operation_;
  const size_t size = size_of(o.input.dtype);
  const size_t count = std::min(o.count - scaled_, kPiece / size);
  if (count == 0) return false;
  scale(o.output.data + scaled_ * size, from + scaled_ * size, count, o.input.dtype, by);
  scaled_ += count;
  return true;
}

/// Empty if MPI runs it, which does not say which ranks it waits for.
std::vector<int> MpiAllReduce::lacking() const {
  return by_mpi_ ? std::vector<int>() : schedules_->lacking();
}

void MpiAllReduce::abort() noexcept {
  schedules_->abort();
  aborted_ = std::exchange(operation_, nullptr) != nullptr;
}

Held MpiAllReduce::let_go() noexcept {
  const Held held = schedules_->let_go();
  return aborted_ && reduction_.count > 0 ? std::max(held, mpi_.port->let_go(reduction_)) : held;
}

}  // namespace farandole
