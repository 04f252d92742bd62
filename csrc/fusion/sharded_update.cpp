#include "fusion/sharded_update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "base/hash.h"
#include "fusion/agreement.h"

namespace farandole {
namespace {

constexpr std::string_view kTaskNames[] = {"step", "norm", "infinity norm"};

std::string update_words(const ShardedOptions& o) {
  return ", sharded update by " + std::string(kOptimizerNames[static_cast<size_t>(o.optimizer)]) +
         " with " + std::to_string(o.slots) + " numbers of state per element";
}

std::vector<Parameter> updatable(std::vector<Parameter> parameters) {
  for (const Parameter& p : parameters)
    if (!can_update(p.dtype))
      throw Error(ErrorCode::invalid_argument, "parameter '" + p.name + "' is " +
                                                   std::string(name_of(p.dtype)) +
                                                   "; a sharded update takes float32 and float64");
  return parameters;
}

Norm norm_of(ShardedUpdate::Task task) {
  return task == ShardedUpdate::Task::norm_two ? Norm::two : Norm::infinite;
}

uint64_t hash_of(const std::vector<std::string>& texts) {
  Hash hash;
  for (const std::string& text : texts) hash.add(text);
  return hash.value();
}

}  // namespace

ShardedUpdate::ShardedUpdate(std::shared_ptr<Group> group, std::vector<Parameter> in_ready_order,
                             const ShardedOptions& options, std::function<void()> interrupted)
    : BucketStep(std::move(group), updatable(std::move(in_ready_order)), options,
                 update_words(options), interrupted),
      steps(parameters_.size()),
      optimizer_(options.optimizer),
      slots_(options.slots),
      interrupted_(std::move(interrupted)),
      over_hosts_(!group_->engine()->host().are_here(group_->members())) {
  for (const Bucket& bucket : buckets_) {
    values_.push_back(group_->allocate(bucket.bytes()));
    shards_.push_back(std::make_shared<Shard>(bucket, group_->size(), group_->rank(), slots_));
    const size_t bytes = std::max<size_t>(shards_.back()->bytes(), 1);
    reduced_.push_back(over_hosts_ ? group_->allocate(bytes) : nullptr);
  }
}

void ShardedUpdate::take(size_t parameter, const std::byte* gradient) {
  open_step();
  copy_in(parameter, gradient);
}

// ---- a task ----

void ShardedUpdate::begin(Task task, std::vector<uint8_t> present,
                          std::vector<HyperParameters> groups, std::vector<int> group_of,
                          double factor) {
  if (step_open()) throw Error(ErrorCode::invalid_argument, "an update is under way already");
  check_groups(groups.size(), group_of);
  task_ = task;
  present_ = std::move(present);
  groups_ = std::move(groups);
  group_of_ = std::move(group_of);
  for (size_t i = 0; i < present_.size(); ++i)
    if (group_of_[i] == kNoGroup) present_[i] = 0;
  factor_ = factor;
  abandoned_ = false;
  launch_facts();
}

void ShardedUpdate::check_groups(size_t groups, const std::vector<int>& group_of) const {
  if (group_of.size() != parameters_.size())
    throw Error(ErrorCode::invalid_argument, "`group_of` has a number for each parameter");
  for (size_t i = 0; i < group_of.size(); ++i) {
    const int group = group_of[i];
    if (group != kNoGroup && (group < 0 || static_cast<size_t>(group) >= groups))
      throw Error(ErrorCode::invalid_argument,
                  "parameter '" + parameters_[i].name + "' is in parameter group " +
                      std::to_string(group) + " of " + std::to_string(groups));
  }
}

void ShardedUpdate::abandon() {
  if (step_open()) return;  // too late to tell
  abandoned_ = true;
  present_.assign(parameters_.size(), 0);
  launch_facts();
}

bool ShardedUpdate::wait(Deadline until) {
  const TraceSpan waiting(group_->engine()->trace(), TraceKind::final_wait, options_.label);
  while (step_open()) {
    try {
      std::optional<Error> first;
      if (!drive(until, first)) return false;
      if (first) throw Error(*first);
      advance();
    } catch (...) {
      rest(false);
      throw;
    }
  }
  return true;
}

void ShardedUpdate::advance() {
  switch (phase_) {
    case Phase::agreeing:
      refuse_quitters();
      refuse_differences();
      if (const auto error = weights_.judge(*group_)) throw Error(*error);
      if (task_ == Task::update) weights_.step_taken();
      prepare();
      launch_buckets();
      return;
    case Phase::working:
      if (over_hosts_) apply_to_parts();
      if (task_ != Task::update) return launch_sum();
      if (over_hosts_) return launch_gathers();
      return rest(true);
    case Phase::gathering:
      return rest(true);
    case Phase::summing:
      norm_ = task_ == Task::norm_two ? std::sqrt(*sum_) : *sum_;
      return rest(true);
    case Phase::resting:
      return;
  }
}

void ShardedUpdate::rest(bool done) {
  phase_ = Phase::resting;
  if (task_ == Task::update || abandoned_) close_step(done && !abandoned_);
}

void ShardedUpdate::launch_facts() {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < present_.size(); ++i) flags_.mark(i, present_[i]);
  flags_.show(hash_of(facts()), !abandoned_);
  launch_flags(0);
  phase_ = Phase::agreeing;
}

void ShardedUpdate::refuse_quitters() {
  const std::vector<int> gave_up = quitters();
  if (!gave_up.empty()) refuse(gave_up, "the step", "no parameter was updated");
}

/// The facts that must be equal on all ranks, in the order in which a difference is reported.
std::vector<std::string> ShardedUpdate::facts() const {
  std::vector<std::string> texts{std::string(kTaskNames[static_cast<size_t>(task_)])};
  for (const HyperParameters& h : groups_) texts.push_back(describe(optimizer_, h));
  std::ostringstream factor;
  factor.precision(17);
  factor << "gradients times " << factor_;
  texts.push_back(factor.str());
  Hash all_steps;
  for (const int64_t s : steps) all_steps.add(static_cast<uint64_t>(s));
  texts.push_back("steps taken: " + std::to_string(steps.empty() ? 0 : steps.front()) +
                  " (all parameters': " + std::to_string(all_steps.value()) + ")");
  Hash all_groups;
  for (const int g : group_of_) all_groups.add(static_cast<uint64_t>(g));
  texts.push_back("groups of parameters: " + std::to_string(all_groups.value()));
  return texts;
}

void ShardedUpdate::refuse_differences() {
  if (flags_.are_alike()) return;
  const OptionsAgreement agreement(*group_, options_.label, interrupted_);
  const std::vector<std::string> texts = facts();
  agreement.require_same("number of parameter groups", std::to_string(groups_.size()),
                         "ranks have different parameter groups", "give every rank the same");
  const auto field = [&](size_t i) -> std::string {
    if (i == 0) return "task";
    if (i <= groups_.size()) return "settings of parameter group " + std::to_string(i - 1);
    return i == groups_.size() + 1 ? "gradient factor" : "optimizer state";
  };
  for (size_t i = 0; i + 1 < texts.size(); ++i)
    agreement.require_same(
        field(i), texts[i], "ranks disagree on the " + field(i) + " of a sharded update",
        "every rank calls step() and clip_grad_norm_() alike, with the same learning rate and so "
        "on, and loads or resets the same state");
  for (size_t i = 0; i < group_of_.size(); ++i) {
    const std::string what = "parameter group of '" + parameters_[i].name + "'";
    const int group = group_of_[i];
    agreement.require_same(what, group == kNoGroup ? "none" : "group " + std::to_string(group),
                           "ranks disagree on the " + what + " in a sharded update",
                           "change the optimizer's param_groups alike on every rank");
  }
  throw Error(ErrorCode::internal, "ranks disagree on an update, but what they do looks the same");
}

/// Zeros the gradients that only other ranks have, and sets each parameter's update.
void ShardedUpdate::prepare() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool used = flags_.most(i) != 0;
    if (used && present_[i] == 0) put_zeros(i);
    if (used && task_ == Task::update) ++steps[i];
  }
  for (const auto& shard : shards_)
    for (size_t k = 0; k < shard->updates.size(); ++k) {
      const auto i = static_cast<size_t>(shard->bucket().placements[k].parameter);
      ParameterUpdate& update = shard->updates[k];
      update.skipped = flags_.most(i) == 0;
      if (update.skipped || task_ != Task::update) continue;
      const HyperParameters& h = groups_[static_cast<size_t>(group_of_[i])];
      update.kind = kind_of(optimizer_, h);
      update.factors = factors_for(optimizer_, h, steps[i], factor_);
    }
}

void ShardedUpdate::make_epilogues() {
  norms_.clear();
  epilogues_.clear();
  const Norm norm = norm_of(task_);
  for (const auto& shard : shards_) {
    if (task_ == Task::update) {
      epilogues_.push_back(shard);
      continue;
    }
    norms_.push_back(std::make_shared<PartNorm>(shard, norm));
    epilogues_.push_back(norms_.back());
  }
}

/// The memory that an operation on a bucket may use until it has ended.
std::shared_ptr<const void> ShardedUpdate::memory_of(size_t bucket) const {
  using Memory = std::vector<std::shared_ptr<const void>>;
  return std::make_shared<Memory>(Memory{memory_[bucket], values_[bucket], reduced_[bucket]});
}

void ShardedUpdate::launch_buckets() {
  make_epilogues();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    const Buffer gradients{memory_[b].get(), bucket.count, bucket.dtype};
    Buffer result{values_[b].get(), bucket.count, bucket.dtype};
    Options what(
        CollectiveSpec{Collective::all_reduce, options_.op, options_.prescale, options_.postscale});
    if (over_hosts_) {
      what.kind = Collective::reduce_scatter;
      result = {reduced_[b].get(), shards_[b]->count(), bucket.dtype};
    } else {
      what.epilogue = epilogues_[b];
    }
    launch_bucket(b, std::move(what), gradients, result, memory_of(b));
  }
  phase_ = Phase::working;
}

/// Over hosts: this rank's part of each bucket is reduced.
void ShardedUpdate::apply_to_parts() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Shard& shard = *shards_[b];
    const size_t offset = shard.first() * size_of(buckets_[b].dtype);
    epilogues_[b]->apply(values_[b].get() + offset, reduced_[b].get(), shard.first(),
                         shard.count());
  }
}

void ShardedUpdate::launch_gathers() {
  const auto ranks = static_cast<size_t>(group_->size());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    const Shard& shard = *shards_[b];
    std::byte* values = values_[b].get();
    const Buffer whole{values, bucket.count, bucket.dtype};
    const Buffer mine{values + shard.first() * size_of(bucket.dtype), shard.count(), bucket.dtype};
    Options what(CollectiveSpec{Collective::all_gather});
    for (size_t r = 0; r < ranks; ++r)
      what.counts.push_back(part_of(bucket, group_->size(), static_cast<int>(r)).count);
    launch("values of bucket " + std::to_string(b), std::move(what), mine, whole, memory_of(b));
  }
  phase_ = Phase::gathering;
}

void ShardedUpdate::launch_sum() {
  for (size_t b = 0; b < norms_.size(); ++b)
    for (ShardCarrier* carrier : shard_carriers_) carrier->finish_norm(b, *norms_[b]);
  *sum_ = 0;
  for (const auto& part : norms_)
    *sum_ = task_ == Task::norm_two ? *sum_ + part->total() : std::fmax(*sum_, part->total());
  for (const auto& part : norms_)
    if (part->total() != part->total()) *sum_ = part->total();  // fmax passes a NaN over
  const Buffer sum{reinterpret_cast<std::byte*>(sum_.get()), 1, DType::float64};
  const ReduceOp op = task_ == Task::norm_two ? ReduceOp::sum : ReduceOp::max;
  launch("norm", CollectiveSpec{Collective::all_reduce, op}, sum, sum, sum_);
  phase_ = Phase::summing;
}

// ---- the optimizer's state ----

size_t ShardedUpdate::state_bytes() const {
  size_t bytes = 0;
  for (const auto& shard : shards_) bytes += shard->slots() * shard->bytes();
  return bytes;
}

void ShardedUpdate::gather_state(size_t b, size_t slot, std::byte* whole) {
  Shard& shard = *shards_[b];
  const size_t bytes = buckets_[b].bytes();
  for (ShardCarrier* carrier : shard_carriers_) carrier->fetch_state(b, shard);
  std::memset(whole, 0, bytes);
  std::memcpy(whole + shard.first() * size_of(buckets_[b].dtype), shard.state(slot), shard.bytes());
  // As bytes, whose sum with zeros is exact, whatever they mean.
  const Buffer buffer{whole, bytes, DType::uint8};
  Options o{{Collective::all_reduce}};
  o.name = "optimizer state (every rank calls state_dict)";
  group_->wait_for(group_->submit_to(stream(), buffer, buffer, std::move(o)), interrupted_);
}

void ShardedUpdate::set_state(size_t b, size_t slot, const std::byte* whole) {
  Shard& shard = *shards_[b];
  // Other slots stay what they are, wherever that is.
  for (ShardCarrier* carrier : shard_carriers_) carrier->fetch_state(b, shard);
  std::memcpy(shard.state(slot), whole + shard.first() * size_of(buckets_[b].dtype), shard.bytes());
  for (ShardCarrier* carrier : shard_carriers_) carrier->replace_state(b, shard);
}

void ShardedUpdate::reset_state(const std::vector<size_t>& parameters) {
  std::set<size_t> buckets;
  for (const size_t i : parameters) buckets.insert(places_.at(i).bucket);
  for (const size_t b : buckets)
    for (ShardCarrier* carrier : shard_carriers_) carrier->fetch_state(b, *shards_[b]);
  for (const size_t i : parameters) {
    shards_[places_[i].bucket]->reset(i);
    steps[i] = 0;
  }
  for (const size_t b : buckets)
    for (ShardCarrier* carrier : shard_carriers_) carrier->replace_state(b, *shards_[b]);
}

}  // namespace farandole
