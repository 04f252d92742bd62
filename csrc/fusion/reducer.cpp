#include "fusion/reducer.h"

#include <map>
#include <optional>
#include <string>

namespace farandole {
namespace {

std::string further_words(const ReducerOptions& o) {
  return ", in_place_bytes " + std::to_string(o.limits.alone_bytes) +
         (o.sparse_as_dense ? ", sparse_as_dense" : "");
}

std::vector<Parameter> with_meaning(std::vector<Parameter> parameters, ReduceOp op) {
  for (const Parameter& p : parameters)
    if (!has_meaning(op, p.dtype))
      throw Error(ErrorCode::invalid_argument, std::string(name_of(op)) +
                                                   " has no meaning on parameter '" + p.name +
                                                   "' of dtype " + std::string(name_of(p.dtype)));
  return parameters;
}

}  // namespace

Reducer::Reducer(std::shared_ptr<Group> group, std::vector<Parameter> parameters,
                 const ReducerOptions& options, const std::function<void()>& interrupted)
    : BucketStep(std::move(group), with_meaning(std::move(parameters), options.op), options,
                 further_words(options), interrupted),
      overlap_(options.overlap),
      sparse_as_dense_(options.sparse_as_dense),
      order_(parameters_.size()),
      left_out_(parameters_.size()) {
  reset(false);
}

void Reducer::mark_ready(int parameter, const std::byte* gradient, int sparse_dims) {
  const auto i = static_cast<size_t>(parameter);
  note_arrival(i, sparse_dims);
  copy_in(i, gradient);
  launch_if_complete(places_[i].bucket);
}

void Reducer::mark_carried(int parameter, const std::function<void()>& bring, int sparse_dims) {
  const auto i = static_cast<size_t>(parameter);
  const Parameter& p = parameters_[i];
  const size_t bytes = p.count * size_of(p.dtype);
  note_arrival(i, sparse_dims);
  if (bytes > 0) {
    const TraceSpan ready(group_->engine()->trace(), TraceKind::ready, p.name, bytes);
    bring();
  }
  launch_if_complete(places_[i].bucket);
}

void Reducer::lend(int parameter, std::byte* gradient, std::shared_ptr<const void> owner,
                   int sparse_dims) {
  const auto i = static_cast<size_t>(parameter);
  const size_t bucket = places_[i].bucket;
  if (!buckets_[bucket].alone)
    throw Error(ErrorCode::invalid_argument,
                "the gradient of '" + parameters_[i].name + "' shares a bucket: it is copied");
  note_arrival(i, sparse_dims);
  {
    const std::lock_guard lock(mutex_);
    lying_[bucket] = {gradient, std::move(owner)};
  }
  launch_if_complete(bucket);
}

void Reducer::note_arrival(size_t i, int sparse_dims) {
  if (sparse_dims < 0 || sparse_dims + 1 >= StepFlags::kAll)
    throw Error(ErrorCode::invalid_argument, "the gradient of '" + parameters_[i].name + "' has " +
                                                 std::to_string(sparse_dims) +
                                                 " sparse dimensions");
  const std::lock_guard lock(mutex_);
  if (rest_launched_ || marked_[i] != 0)
    throw Error(ErrorCode::invalid_argument,
                "the gradient of '" + parameters_[i].name + "' became ready twice in one step", {},
                "call step() or zero_grad() between two backward passes, or ask for "
                "accumulation (backward_passes_per_step)");
  open_step();
  marked_[i] = static_cast<uint8_t>(1 + sparse_dims);
  ++marked_count_;
  order_.note(i);
}

void Reducer::launch_if_complete(size_t bucket) {
  {
    const std::lock_guard lock(mutex_);
    --missing_[bucket];
    if (!overlap_) return;
    launch_complete();
    if (launched_ == 0) return;
  }
  // Without a core to spare nobody else brings the launched buckets on.
  group_->engine()->driver().turn(Driver::kTurn);
}

void Reducer::launch_complete() {
  while (launched_ < buckets_.size()) {
    const size_t end = end_of_launch(buckets_, launched_);
    for (size_t b = launched_; b < end; ++b)
      if (missing_[b] != 0) return;
    while (launched_ < end) launch(launched_);
  }
}

void Reducer::launch(size_t b) {
  const Bucket& bucket = buckets_[b];
  Lying& lying = lying_[b];
  const bool copied = lying.gradient == nullptr;
  const Buffer whole{copied ? memory(b).get() : lying.gradient, bucket.count, bucket.dtype};
  // Gradients that share a bucket are prescaled by the copy into it. One that is alone may be
  // copied on some ranks only, so the operation prescales it.
  const double prescale = bucket.alone ? options_.prescale : 1;
  std::shared_ptr<const void> owner = copied ? memory_[b] : std::move(lying.owner);
  Options what(CollectiveSpec{Collective::all_reduce, options_.op, prescale, options_.postscale});
  launch_bucket(b, std::move(what), whole, whole, std::move(owner));
  ++launched_;
}

void Reducer::launch_rest() {
  const std::lock_guard lock(mutex_);
  if (rest_launched_) return;
  rest_launched_ = true;
  open_step();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    flags_.mark(i, marked_[i]);
    if (marked_[i] != 0) continue;
    put_zeros(i);
    --missing_[places_[i].bucket];
  }
  flags_.show(settings_, !by_proxy_);
  launch_complete();
  // Until all ranks have completed a step.
  if (!order_.agreed()) launch_max("ready order", order_.positions(), DType::int32);
  launch_flags(static_cast<uint8_t>(by_proxy_ ? 0 : kUpdated + updates_ % kUpdates));
}

bool Reducer::wait(Deadline until) {
  const TraceSpan waiting(group_->engine()->trace(), TraceKind::final_wait, options_.label);
  std::optional<Error> first;
  try {
    launch_rest();
  } catch (const Error& error) {
    first = error;
  }
  if (!drive(until, first)) return false;
  const std::vector<int> gave_up = quitters();
  settings_differ_ = !first && !flags_.are_alike();
  if (!first && gave_up.empty()) first = ranks_apart();
  std::optional<size_t> differs;
  if (!first && gave_up.empty()) {
    differs = laid_out_differently();
    if (!differs) plan_again();
    if (!differs) first = weights_.judge(*group_);
  }
  if (!first && !differs && gave_up.empty()) weights_.step_taken();
  const int mine = differs ? marked_[*differs] - 1 : 0;
  reset(!first && !differs && gave_up.empty());
  if (first) throw Error(*first);
  if (differs) refuse_layouts(*differs, mine);
  if (gave_up.empty()) return true;
  refuse(gave_up, "backward", "this step's gradients are incomplete");
}

bool Reducer::weights_due() const {
  const std::lock_guard lock(mutex_);
  return !rest_launched_ && weights_.due();
}

void Reducer::abandon() {
  {
    const std::lock_guard lock(mutex_);
    if (rest_launched_) return;  // too late to tell: the peers have this rank's gradients already
    abandoned_ = true;
  }
  launch_rest();
}

void Reducer::step_by_proxy() {
  take_better_plan();
  {
    const std::lock_guard lock(mutex_);
    order_.yield();
    by_proxy_ = true;
  }
  launch_rest();
}

bool Reducer::step_over() const {
  const std::lock_guard lock(mutex_);
  return rest_launched_ && is_idle();
}

void Reducer::reset(bool done) {
  const std::lock_guard lock(mutex_);
  close_step(done);
  begin_step();
}

void Reducer::begin_step() {
  order_.begin();
  marked_.assign(parameters_.size(), 0);
  missing_.assign(buckets_.size(), 0);
  lying_.assign(buckets_.size(), {});
  for (size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].placements.size();
  marked_count_ = 0;
  launched_ = 0;
  rest_launched_ = by_proxy_ = abandoned_ = false;
}

/// Ranks that backward more or less often than others between two steps would reduce gradients of
/// different steps together, for ever after.
std::optional<Error> Reducer::ranks_apart() {
  Context where;
  where.operation = options_.label;
  std::map<int64_t, std::vector<int>> ranks;
  for (int r = 0; r < group_->size(); ++r) {
    const int64_t fare = flags_.fare(r);
    if (fare < kUpdated) continue;  // it has joined
    int64_t ahead = (fare - kUpdated - updates_ % kUpdates + kUpdates) % kUpdates;
    if (ahead > kUpdates / 2) ahead -= kUpdates;
    ranks[updates_ + ahead].push_back(group_->members()[static_cast<size_t>(r)]);
  }
  if (ranks.size() < 2) return std::nullopt;
  std::string said;
  for (const auto& [updates, those] : ranks) {
    said += (said.empty() ? "" : ", ") + name_ranks(those) + " after " + std::to_string(updates);
    where.values.push_back({"after " + std::to_string(updates) + " steps", those});
  }
  where.rank = ranks.begin()->second.front();
  return Error(ErrorCode::mismatch,
               "ranks reduce gradients of different steps of " + options_.label + ": " + said,
               std::move(where),
               "let every rank call backward() and step() as often as the others; join() where "
               "ranks have different numbers of batches");
}

}  // namespace farandole
