#include "fusion/reducer.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <sstream>

#include "fold/fold.h"
#include "fusion/agreement.h"

namespace farandole {
namespace {

std::string words(const ReducerOptions& o) {
  std::ostringstream text;
  text << name_of(o.op) << ", prescale " << o.prescale << ", postscale " << o.postscale
       << ", bucket_bytes " << o.limits.bytes << ", first_bucket_bytes " << o.limits.first_bytes
       << ", in_place_bytes " << o.limits.alone_bytes;
  if (o.sparse_as_dense) text << ", sparse_as_dense";
  return text.str();
}

}  // namespace

Reducer::Reducer(std::shared_ptr<Group> group, std::vector<Parameter> parameters,
                 ReducerOptions options, const std::function<void()>& interrupted)
    : group_(std::move(group)),
      options_(std::move(options)),
      parameters_(std::move(parameters)),
      buckets_(plan_buckets(parameters_, options_.limits)),
      order_(parameters_.size()),
      left_out_(parameters_.size()) {
  for (const Parameter& p : parameters_)
    if (!has_meaning(options_.op, p.dtype))
      throw Error(ErrorCode::invalid_argument, std::string(name_of(options_.op)) +
                                                   " has no meaning on parameter '" + p.name +
                                                   "' of dtype " + std::string(name_of(p.dtype)));
  const OptionsAgreement agreement(*group_, options_.label, interrupted);
  agreement.require_same("reduction", words(options_),
                         "ranks reduce " + options_.label + " differently",
                         "give every rank the same options and the same FARANDOLE_BUCKET_BYTES");
  agreement.require_same_plan(parameters_, buckets_);
  allocate_buckets();
  step_.emplace(group_, options_.label);
  used_->resize(2 * (parameters_.size() + kSettings) + static_cast<size_t>(group_->size()));
  reset();
}

void Reducer::allocate_buckets() {
  carriers_.let_go();
  memory_.clear();  // first: with nobody else's views of it, the new buckets take its room
  for (const Bucket& bucket : buckets_)
    memory_.push_back(bucket.alone ? nullptr : group_->allocate(bucket.bytes()));
  places_ = places_of(buckets_, parameters_.size());
}

const std::shared_ptr<std::byte>& Reducer::memory(size_t bucket) {
  if (!memory_[bucket]) {
    try {
      memory_[bucket] = group_->allocate(buckets_[bucket].bytes());
    } catch (const Error& error) {
      group_->abort(error);  // the other ranks count on this one's share
      throw;
    }
  }
  return memory_[bucket];
}

std::byte* Reducer::address(int parameter) {
  const BucketPlace& p = places_[static_cast<size_t>(parameter)];
  return memory(p.bucket).get() + p.offset;
}

void Reducer::mark_ready(int parameter, const std::byte* gradient, int sparse_dims) {
  const auto i = static_cast<size_t>(parameter);
  const Parameter& p = parameters_[i];
  note_arrival(i, sparse_dims);
  const size_t bucket = places_[i].bucket;
  {
    const TraceSpan ready(group_->engine()->trace(), TraceKind::ready, p.name,
                          p.count * size_of(p.dtype));
    std::byte* const here = address(parameter);
    const double factor = copied_prescale(bucket);
    if (gradient != here || factor != 1) scale(here, gradient, p.count, p.dtype, {factor, 1});
  }
  launch_if_complete(bucket);
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
  if (sparse_dims < 0 || sparse_dims + 1 >= kAll)
    throw Error(ErrorCode::invalid_argument, "the gradient of '" + parameters_[i].name + "' has " +
                                                 std::to_string(sparse_dims) +
                                                 " sparse dimensions");
  const std::lock_guard lock(mutex_);
  if (rest_launched_ || marked_[i] != 0)
    throw Error(ErrorCode::invalid_argument,
                "the gradient of '" + parameters_[i].name + "' became ready twice in one step", {},
                "call step() or zero_grad() between two backward passes, or ask for "
                "accumulation (backward_passes_per_step)");
  step_->open();
  marked_[i] = static_cast<uint8_t>(1 + sparse_dims);
  ++marked_count_;
  order_.note(i);
}

void Reducer::launch_if_complete(size_t bucket) {
  {
    const std::lock_guard lock(mutex_);
    --missing_[bucket];
    if (!options_.overlap) return;
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
  Carried carried = carriers_.launch(b);
  const bool copied = lying.gradient == nullptr;
  const Buffer whole{copied ? memory_[b].get() : lying.gradient, bucket.count, bucket.dtype};
  // Gradients that share a bucket are prescaled by the copy into it. One that is alone may be
  // copied on some ranks only, so the operation prescales it.
  const double prescale = bucket.alone ? options_.prescale : 1;
  std::shared_ptr<const void> owner = copied ? memory_[b] : std::move(lying.owner);
  Options what(CollectiveSpec{Collective::all_reduce, options_.op, prescale, options_.postscale});
  what.gate = std::move(carried.gate);
  what.on_devices = std::move(carried.on_devices);
  step_->launch("bucket " + std::to_string(b), std::move(what), whole, whole, std::move(owner));
  ++launched_;
}

void Reducer::launch_rest() {
  const std::lock_guard lock(mutex_);
  if (rest_launched_) return;
  rest_launched_ = true;
  step_->open();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    (*used_)[i] = marked_[i];
    (*used_)[parameters_.size() + i] =
        marked_[i] == 0 ? 0 : static_cast<uint8_t>(kAll - marked_[i]);
    if (marked_[i] != 0) continue;
    std::byte* const here = address(static_cast<int>(i));
    if (!carriers_.carries(i))
      std::memset(here, 0, parameters_[i].count * size_of(parameters_[i].dtype));
    --missing_[places_[i].bucket];
  }
  fill_settings();
  if (!by_proxy_ && fare(group_->rank()) == 0)
    fare(group_->rank()) = static_cast<uint8_t>(kUpdated + updates_ % kUpdates);
  launch_complete();
  step_->launch_max("used", used_, DType::uint8);
  const auto& positions = order_.positions();  // until all ranks have completed a step
  if (!order_.agreed()) step_->launch_max("ready order", positions, DType::int32);
  step_->launch_weights();
}

bool Reducer::wait(Deadline until) {
  const TraceSpan waiting(group_->engine()->trace(), TraceKind::final_wait, options_.label);
  std::optional<Error> first;
  try {
    launch_rest();
  } catch (const Error& error) {
    first = error;
  }
  const bool over = step_->wait(until, first);
  if (!over) return false;
  const std::vector<int> quitters = step_->quitters(&fare(0));
  settings_differ_ = !first && compare_settings();
  if (!first && quitters.empty()) first = ranks_apart();
  std::optional<size_t> differs;
  if (!first && quitters.empty()) {
    differs = laid_out_differently();
    if (!differs) plan_again();
    if (!differs) first = step_->judge_weights();
  }
  if (!first && !differs && quitters.empty()) step_->step_taken();
  const int mine = differs ? marked_[*differs] - 1 : 0;
  reset();
  if (first) throw Error(*first);
  if (differs) refuse_layouts(*differs, mine);
  if (quitters.empty()) return true;
  step_->refuse(quitters, "backward", "this step's gradients are incomplete");
}

void Reducer::watch_weights(WeightsWatch watch) {
  const std::lock_guard lock(mutex_);
  step_->watch(std::move(watch));
}

bool Reducer::weights_due() const {
  const std::lock_guard lock(mutex_);
  return !rest_launched_ && step_->weights_due();
}

void Reducer::show_weights(std::vector<uint64_t> checksums) {
  const std::lock_guard lock(mutex_);
  step_->show_weights(std::move(checksums));
}

void Reducer::abandon() {
  {
    const std::lock_guard lock(mutex_);
    if (rest_launched_) return;  // too late to tell: the peers have this rank's gradients already
    fare(group_->rank()) = BucketStep::kAbandoned;
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
  return rest_launched_ && step_->over();
}

bool Reducer::drain(Deadline until) {
  try {
    return !step_open() || wait(until);
  } catch (const Error&) {
    group_->check();
    return true;
  }
}

void Reducer::reset() {
  const std::lock_guard lock(mutex_);
  step_->close();
  begin_step();
}

void Reducer::begin_step() {
  order_.begin();
  marked_.assign(parameters_.size(), 0);
  missing_.assign(buckets_.size(), 0);
  lying_.assign(buckets_.size(), {});
  for (size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].placements.size();
  std::fill_n(used_->rbegin(), group_->size(), 0);
  marked_count_ = 0;
  launched_ = 0;
  rest_launched_ = by_proxy_ = false;
}

uint8_t& Reducer::fare(int rank) {
  return (*used_)[2 * (parameters_.size() + kSettings) + static_cast<size_t>(rank)];
}

void Reducer::fill_settings() {
  uint8_t* const largest = used_->data() + 2 * parameters_.size();
  for (size_t i = 0; i < kSettings; ++i) {
    const auto byte = static_cast<uint8_t>(settings_ >> (8 * i));
    largest[i] = by_proxy_ ? 0 : byte;
    largest[kSettings + i] = by_proxy_ ? 0 : static_cast<uint8_t>(kAll - byte);
  }
}

/// The largest byte of all ranks, and 255 minus the smallest, are together 255 where all are alike.
bool Reducer::compare_settings() const {
  const uint8_t* const largest = used_->data() + 2 * parameters_.size();
  for (size_t i = 0; i < kSettings; ++i)
    if (largest[i] + largest[kSettings + i] > kAll) return true;
  return false;
}

/// Ranks that backward more or less often than others between two steps would reduce gradients of
/// different steps together, for ever after.
std::optional<Error> Reducer::ranks_apart() {
  Context where;
  where.operation = options_.label;
  std::map<int64_t, std::vector<int>> ranks;
  for (int r = 0; r < group_->size(); ++r) {
    if (fare(r) < kUpdated) continue;  // it has joined
    int64_t ahead = (fare(r) - kUpdated - updates_ % kUpdates + kUpdates) % kUpdates;
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
