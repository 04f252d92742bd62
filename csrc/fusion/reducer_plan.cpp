// How the plan of a Reducer changes, and what has to be agreed for that: the order in which
// gradients become ready, and which are sparse.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "fusion/agreement.h"
#include "fusion/reducer.h"

namespace farandole {
namespace {

constexpr double kWorthIt = 0.01;  // of backward, that the average byte must be launched earlier

}  // namespace

/// A parameter whose gradients are sparse on some ranks and dense on others; or were sparse before,
/// and now are dense.
std::optional<size_t> Reducer::laid_out_differently() const {
  if (sparse_as_dense_) return std::nullopt;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int most = flags_.most(i), least = flags_.least(i);
    if (most != 0 && (most != least || (most == kDense && left_out_[i] > 0))) return i;
  }
  return std::nullopt;
}

/// Throws on every rank. `mine`: sparse dimensions of this rank's gradient, -1 if there is none.
void Reducer::refuse_layouts(size_t i, int mine) const {
  const std::string advice = "reduce sparse gradients as dense ones, or make them sparse always";
  const std::string& name = parameters_[i].name;
  const std::string layout = mine < 0    ? "no gradient"
                             : mine == 0 ? "dense"
                                         : "sparse in " + std::to_string(mine) + " dimensions";
  const int most = flags_.most(i), least = flags_.least(i);
  if (most != least)
    OptionsAgreement(*group_, options_.label, [] {})
        .require_same("layout of '" + name + "'", layout,
                      "ranks have gradients of different layouts of '" + name + "'", advice);
  throw Error(ErrorCode::invalid_argument,
              "the gradient of '" + name + "' was sparse in earlier steps and is dense now", {},
              advice);
}

/// Every rank comes here after the same steps, with the same positions and layouts.
void Reducer::plan_again() {
  const std::lock_guard lock(mutex_);
  std::vector<Parameter> parameters = better_ ? better_->parameters : parameters_;
  const bool must = leave_out_sparse(parameters);
  if (!must && order_.agreed()) return;
  const std::vector<int> order = order_.agree();
  launch_point_ = launch_point(parameters_, buckets_, order);
  std::vector<Bucket> plan = plan_buckets(parameters, order, options_.limits);
  const double point = launch_point(parameters, plan, order);
  if (must || point + kWorthIt <= launch_point_)
    better_ = {std::move(parameters), std::move(plan), point};
}

/// Takes their room from those whose gradients turned out to be sparse; false if none is new.
bool Reducer::leave_out_sparse(std::vector<Parameter>& parameters) {
  if (sparse_as_dense_) return false;
  bool any = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (flags_.most(i) <= kDense || left_out_[i] > 0) continue;
    any = true;
    left_out_[i] = flags_.most(i) - kDense;
    parameters[i].count = 0;
  }
  return any;
}

void Reducer::take_better_plan() {
  const std::lock_guard lock(mutex_);
  if (!better_) return;
  if (marked_count_ > 0 || rest_launched_)
    throw Error(ErrorCode::invalid_argument,
                "buckets of " + options_.label + " cannot change while a step is open");
  const TraceSpan planning(group_->engine()->trace(), TraceKind::plan, "buckets in ready order");
  parameters_ = std::move(better_->parameters);
  buckets_ = std::move(better_->buckets);
  launch_point_ = better_->launch_point;
  better_.reset();
  try {
    allocate_buckets();
  } catch (const Error& error) {
    group_->abort(error);  // the other ranks have the new plan already
    throw;
  }
  begin_step();
}

std::string Reducer::describe() const {
  const std::lock_guard lock(mutex_);
  std::ostringstream text;
  text << options_.label << ": " << parameters_.size() << " parameters in " << buckets_.size()
       << (buckets_.size() == 1 ? " bucket" : " buckets");
  const auto alone = std::count_if(buckets_.begin(), buckets_.end(),
                                   [](const Bucket& bucket) { return bucket.alone; });
  if (alone > 0) text << ", " << alone << " of them a large tensor where it lies";
  const auto sparse = std::ranges::count_if(left_out_, [](int dims) { return dims > 0; });
  if (sparse > 0) text << ", " << sparse << " sparse ones apart";
  if (launch_point_ >= 0)
    text << ", the average byte launched at " << std::lround(100 * launch_point_)
         << " % of backward";
  if (better_)
    text << "; from the next step on in ready order, at "
         << std::lround(100 * better_->launch_point) << " %";
  return text.str();
}

}  // namespace farandole
