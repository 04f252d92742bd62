#include "fusion/sharded_update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <sstream>

#include "base/copy.h"
#include "base/hash.h"
#include "fusion/agreement.h"

namespace farandole {
namespace {

constexpr std::string_view kTaskNames[] = {"step", "norm", "infinity norm"};

std::string describe(const ShardedOptions& o) {
  std::ostringstream text;
  text << name_of(o.op) << ", prescale " << o.prescale << ", postscale " << o.postscale
       << ", bucket_bytes " << o.limits.bytes << ", first_bucket_bytes " << o.limits.first_bytes
       << ", sharded update by " << kOptimizerNames[static_cast<size_t>(o.optimizer)] << " with "
       << o.slots << " numbers of state per element";
  return text.str();
}

Norm norm_of(ShardedUpdate::Task task) {
  return task == ShardedUpdate::Task::norm_two ? Norm::two : Norm::infinite;
}

uint64_t hash_of(const std::vector<std::string>& texts) {
  Hash hash;
  for (const std::string& text : texts) hash.add(text);
  return hash.value();
}

// Note [Equal everywhere]
//
// A maximum over the ranks tells whether all gave the same bytes, when each gives them once as they
// are and once complemented: largest and smallest are equal where all are. So one small all-reduce
// carries both what is or-ed (used, gave up) and what must be equal.
constexpr size_t kHashBytes = sizeof(uint64_t);

void put_twofold(uint8_t* to, uint64_t hash) {
  for (size_t i = 0; i < kHashBytes; ++i) {
    to[i] = static_cast<uint8_t>(hash >> (8 * i));
    to[kHashBytes + i] = static_cast<uint8_t>(~to[i]);
  }
}

bool equal_everywhere(const uint8_t* largest) {
  for (size_t i = 0; i < kHashBytes; ++i)
    if (static_cast<uint8_t>(~largest[i]) != largest[kHashBytes + i]) return false;
  return true;
}

}  // namespace

ShardedUpdate::ShardedUpdate(std::shared_ptr<Group> group, std::vector<Parameter> in_ready_order,
                             std::vector<size_t> hyper_group, ShardedOptions options,
                             std::function<void()> interrupted)
    : steps(in_ready_order.size()),
      group_(std::move(group)),
      options_(std::move(options)),
      interrupted_(std::move(interrupted)),
      parameters_(std::move(in_ready_order)),
      hyper_group_(std::move(hyper_group)),
      buckets_(plan_buckets(parameters_, options_.limits)),
      places_(places_of(buckets_, parameters_.size())),
      over_hosts_(!group_->engine()->host().are_here(group_->members())) {
  for (const Parameter& p : parameters_)
    if (!can_update(p.dtype))
      throw Error(ErrorCode::invalid_argument, "parameter '" + p.name + "' is " +
                                                   std::string(name_of(p.dtype)) +
                                                   "; a sharded update takes float32 and float64");
  const OptionsAgreement agreement(*group_, options_.label, interrupted_);
  agreement.require_same("reduction", describe(options_),
                         "ranks reduce " + options_.label + " differently",
                         "give every rank the same options and the same FARANDOLE_BUCKET_BYTES");
  agreement.require_same_plan(parameters_, buckets_);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    gradients_.push_back(group_->allocate(buckets_[b].bytes()));
    values_.push_back(group_->allocate(buckets_[b].bytes()));
    shards_.push_back(
        std::make_shared<Shard>(buckets_[b], group_->size(), group_->rank(), options_.slots));
    const size_t bytes = std::max<size_t>(shards_[b]->bytes(), 1);
    reduced_.push_back(over_hosts_ ? group_->allocate(bytes) : nullptr);
  }
  step_.emplace(group_, options_.label);
  flags_ = std::make_shared<std::vector<uint8_t>>(
      parameters_.size() + static_cast<size_t>(group_->size()) + 2 * kHashBytes);
}

void ShardedUpdate::take(size_t parameter, const std::byte* gradient) {
  const Parameter& p = parameters_[parameter];
  const BucketPlace& place = places_[parameter];
  const size_t bytes = p.count * size_of(p.dtype);
  const TraceSpan ready(group_->engine()->trace(), TraceKind::ready, p.name, bytes);
  step_->open();
  copy_bytes(gradients_[place.bucket].get() + place.offset, gradient, bytes);
}

// ---- a task ----

void ShardedUpdate::begin(Task task, std::vector<uint8_t> present,
                          std::vector<HyperParameters> groups, double factor) {
  if (busy()) throw Error(ErrorCode::invalid_argument, "an update is under way already");
  task_ = task;
  present_ = std::move(present);
  groups_ = std::move(groups);
  factor_ = factor;
  abandoned_ = false;
  launch_flags();
}

void ShardedUpdate::abandon() {
  if (busy()) return;  // too late to tell
  abandoned_ = true;
  present_.assign(parameters_.size(), 0);
  launch_flags();
}

bool ShardedUpdate::drain(Deadline until) {
  try {
    return wait(until);
  } catch (const Error&) {
    group_->check();
    return true;
  }
}

bool ShardedUpdate::wait(Deadline until) {
  const TraceSpan waiting(group_->engine()->trace(), TraceKind::final_wait, options_.label);
  while (busy()) {
    try {
      std::optional<Error> first;
      if (!step_->wait(until, first)) return false;
      if (first) throw Error(*first);
      advance();
    } catch (...) {
      rest();
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
      if (const auto error = step_->judge_weights()) throw Error(*error);
      if (task_ == Task::update) step_->step_taken();
      prepare();
      launch_buckets();
      return;
    case Phase::working:
      if (over_hosts_) apply_to_parts();
      if (task_ != Task::update) return launch_sum();
      if (over_hosts_) return launch_gathers();
      return rest();
    case Phase::gathering:
      return rest();
    case Phase::summing:
      norm_ = task_ == Task::norm_two ? std::sqrt(*sum_) : *sum_;
      return rest();
    case Phase::resting:
      return;
  }
}

void ShardedUpdate::rest() {
  phase_ = Phase::resting;
  if (task_ == Task::update || abandoned_) step_->close();
}

void ShardedUpdate::launch_flags() {
  std::vector<uint8_t>& flags = *flags_;
  std::fill(flags.begin(), flags.end(), 0);
  std::copy(present_.begin(), present_.end(), flags.begin());
  flags[parameters_.size() + static_cast<size_t>(group_->rank())] = abandoned_ ? 1 : 0;
  put_twofold(flags.data() + flags.size() - 2 * kHashBytes, abandoned_ ? 0 : hash_of(facts()));
  step_->launch_max("used", flags_, DType::uint8);
  step_->launch_weights();
  phase_ = Phase::agreeing;
}

void ShardedUpdate::refuse_quitters() {
  const std::vector<int> quitters = step_->quitters(flags_->data() + parameters_.size());
  if (!quitters.empty()) step_->refuse(quitters, "the step", "no parameter was updated");
}

/// The facts that must be equal on all ranks, in the order in which a difference is reported.
std::vector<std::string> ShardedUpdate::facts() const {
  std::vector<std::string> texts{std::string(kTaskNames[static_cast<size_t>(task_)])};
  for (const HyperParameters& h : groups_) texts.push_back(describe(options_.optimizer, h));
  std::ostringstream factor;
  factor.precision(17);
  factor << "gradients times " << factor_;
  texts.push_back(factor.str());
  Hash all_steps;
  for (const int64_t s : steps) all_steps.add(static_cast<uint64_t>(s));
  texts.push_back("steps taken: " + std::to_string(steps.empty() ? 0 : steps.front()) +
                  " (all parameters': " + std::to_string(all_steps.value()) + ")");
  return texts;
}

void ShardedUpdate::refuse_differences() {
  if (equal_everywhere(flags_->data() + flags_->size() - 2 * kHashBytes)) return;
  const OptionsAgreement agreement(*group_, options_.label, interrupted_);
  const std::vector<std::string> texts = facts();
  agreement.require_same("number of parameter groups", std::to_string(groups_.size()),
                         "ranks have different parameter groups", "give every rank the same");
  const auto field = [&](size_t i) -> std::string {
    if (i == 0) return "task";
    if (i <= groups_.size()) return "settings of parameter group " + std::to_string(i - 1);
    return i + 1 < texts.size() ? "gradient factor" : "optimizer state";
  };
  for (size_t i = 0; i < texts.size(); ++i)
    agreement.require_same(
        field(i), texts[i], "ranks disagree on the " + field(i) + " of a sharded update",
        "every rank calls step() and clip_grad_norm_() alike, with the same learning rate and so "
        "on, and loads the same state");
  throw Error(ErrorCode::internal, "ranks disagree on an update, but what they do looks the same");
}

/// Zeros the gradients that only other ranks have, and sets each parameter's update.
void ShardedUpdate::prepare() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool used = (*flags_)[i] != 0;
    const Parameter& p = parameters_[i];
    if (used && present_[i] == 0)
      std::memset(gradients_[places_[i].bucket].get() + places_[i].offset, 0,
                  p.count * size_of(p.dtype));
    if (used && task_ == Task::update) ++steps[i];
  }
  for (const auto& shard : shards_)
    for (size_t k = 0; k < shard->updates.size(); ++k) {
      const auto i = static_cast<size_t>(shard->bucket().placements[k].parameter);
      ParameterUpdate& update = shard->updates[k];
      update.skipped = (*flags_)[i] == 0;
      if (update.skipped || task_ != Task::update) continue;
      const HyperParameters& h = groups_[hyper_group_[i]];
      update.kind = kind_of(options_.optimizer, h);
      update.factors = factors_for(options_.optimizer, h, steps[i], factor_);
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
  return std::make_shared<Memory>(Memory{gradients_[bucket], values_[bucket], reduced_[bucket]});
}

void ShardedUpdate::launch_buckets() {
  make_epilogues();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    const Buffer gradients{gradients_[b].get(), bucket.count, bucket.dtype};
    Buffer result{values_[b].get(), bucket.count, bucket.dtype};
    Options what(
        CollectiveSpec{Collective::all_reduce, options_.op, options_.prescale, options_.postscale});
    if (over_hosts_) {
      what.kind = Collective::reduce_scatter;
      result = {reduced_[b].get(), shards_[b]->count(), bucket.dtype};
    } else {
      what.epilogue = epilogues_[b];
      what.on_devices = carried(b);
    }
    step_->launch("bucket " + std::to_string(b), std::move(what), gradients, result, memory_of(b));
  }
  phase_ = Phase::working;
}

std::shared_ptr<OnDevices> ShardedUpdate::carried(size_t bucket) {
  for (ShardCarrier* carrier : carriers_) {
    auto on_devices = task_ == Task::update
                          ? carrier->launch(bucket, *shards_[bucket])
                          : carrier->launch_norm(bucket, *shards_[bucket], norm_of(task_));
    if (on_devices) return on_devices;
  }
  return nullptr;
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
    step_->launch("values of bucket " + std::to_string(b), std::move(what), mine, whole,
                  memory_of(b));
  }
  phase_ = Phase::gathering;
}

void ShardedUpdate::launch_sum() {
  for (size_t b = 0; b < norms_.size(); ++b)
    for (ShardCarrier* carrier : carriers_) carrier->finish_norm(b, *norms_[b]);
  *sum_ = 0;
  for (const auto& part : norms_)
    *sum_ = task_ == Task::norm_two ? *sum_ + part->total() : std::fmax(*sum_, part->total());
  for (const auto& part : norms_)
    if (part->total() != part->total()) *sum_ = part->total();  // fmax passes a NaN over
  const Buffer sum{reinterpret_cast<std::byte*>(sum_.get()), 1, DType::float64};
  const ReduceOp op = task_ == Task::norm_two ? ReduceOp::sum : ReduceOp::max;
  step_->launch("norm", CollectiveSpec{Collective::all_reduce, op}, sum, sum, sum_);
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
  for (ShardCarrier* carrier : carriers_) carrier->fetch_state(b, shard);
  std::memset(whole, 0, bytes);
  std::memcpy(whole + shard.first() * size_of(buckets_[b].dtype), shard.state(slot), shard.bytes());
  // As bytes, whose sum with zeros is exact, whatever they mean.
  const Buffer buffer{whole, bytes, DType::uint8};
  Options o{{Collective::all_reduce}};
  o.name = "optimizer state (every rank calls state_dict)";
  group_->wait_for(group_->submit_to(step_->stream(), buffer, buffer, std::move(o)), interrupted_);
}

void ShardedUpdate::set_state(size_t b, size_t slot, const std::byte* whole) {
  Shard& shard = *shards_[b];
  // Other slots stay what they are, wherever that is.
  for (ShardCarrier* carrier : carriers_) carrier->fetch_state(b, shard);
  std::memcpy(shard.state(slot), whole + shard.first() * size_of(buckets_[b].dtype), shard.bytes());
  for (ShardCarrier* carrier : carriers_) carrier->replace_state(b, shard);
}

}  // namespace farandole
