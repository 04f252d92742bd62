#include "fusion/bucket_step.h"

#include <cstring>
#include <sstream>
#include <utility>

#include "fold/fold.h"
#include "fusion/agreement.h"
#include "stream/bytes_begun.h"

namespace farandole {
namespace {

std::vector<BucketPlace> places_of(const std::vector<Bucket>& buckets, size_t parameters) {
  std::vector<BucketPlace> places(parameters);
  for (size_t b = 0; b < buckets.size(); ++b)
    for (const Placement& item : buckets[b].placements)
      places[static_cast<size_t>(item.parameter)] = {b, item.offset * size_of(buckets[b].dtype)};
  return places;
}

std::string words(const BucketOptions& o) {
  std::ostringstream text;
  text << name_of(o.op) << ", prescale " << o.prescale << ", postscale " << o.postscale
       << ", bucket_bytes " << o.limits.bytes << ", first_bucket_bytes " << o.limits.first_bytes;
  return text.str();
}

}  // namespace

BucketStep::BucketStep(std::shared_ptr<Group> group, std::vector<Parameter> parameters,
                       BucketOptions options, const std::string& further,
                       const std::function<void()>& interrupted)
    : group_(std::move(group)),
      options_(std::move(options)),
      parameters_(std::move(parameters)),
      buckets_(plan_buckets(parameters_, options_.limits)),
      flags_(parameters_.size(), group_->size()) {
  const OptionsAgreement agreement(*group_, options_.label, interrupted);
  agreement.require_same("reduction", words(options_) + further,
                         "ranks reduce " + options_.label + " differently",
                         "give every rank the same options and the same FARANDOLE_BUCKET_BYTES");
  agreement.require_same_plan(parameters_, buckets_);
  allocate_buckets();
  stream_ = group_->open_stream(options_.label);
  trace_ = {options_.label, stream_->key()};
}

void BucketStep::end() noexcept {
  try {
    for (const Handle& h : in_flight_) h.wait(Deadline::after(std::chrono::seconds(5)));
  } catch (const Error&) {  // NOLINT: a failed group has nobody inside its memory any more
  }
  carriers_.end();
}

// ---- memory ----

void BucketStep::allocate_buckets() {
  carriers_.let_go();
  memory_.clear();  // first: with nobody else's views of it, the new buckets take its room
  for (const Bucket& bucket : buckets_)
    memory_.push_back(bucket.alone ? nullptr : group_->allocate(bucket.bytes()));
  places_ = places_of(buckets_, parameters_.size());
}

const std::shared_ptr<std::byte>& BucketStep::memory(size_t bucket) {
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

std::byte* BucketStep::address(size_t parameter) {
  const BucketPlace& p = places_[parameter];
  return memory(p.bucket).get() + p.offset;
}

void BucketStep::copy_in(size_t parameter, const std::byte* gradient) {
  const Parameter& p = parameters_[parameter];
  const TraceSpan ready(group_->engine()->trace(), TraceKind::ready, p.name,
                        p.count * size_of(p.dtype));
  std::byte* const here = address(parameter);
  const double factor = copied_prescale(places_[parameter].bucket);
  if (gradient != here || factor != 1) scale(here, gradient, p.count, p.dtype, {factor, 1});
}

void BucketStep::put_zeros(size_t parameter) {
  std::byte* const here = address(parameter);
  const Parameter& p = parameters_[parameter];
  if (!carriers_.carries(parameter)) std::memset(here, 0, p.count * size_of(p.dtype));
}

// ---- operations ----

void BucketStep::launch_bucket(size_t b, Options what, Buffer input, Buffer output,
                               std::shared_ptr<const void> memory) {
  Carried carried = carriers_.launch(b);
  what.gate = std::move(carried.gate);
  what.on_devices = std::move(carried.on_devices);
  launch("bucket " + std::to_string(b), std::move(what), input, output, std::move(memory));
}

void BucketStep::launch(const std::string& name, Options what, Buffer input, Buffer output,
                        std::shared_ptr<const void> memory) {
  what.name = name;
  what.keepalive = std::move(memory);
  bytes_begun_in_steps.fetch_add(input.bytes(), std::memory_order_relaxed);
  in_flight_.push_back(group_->submit_to(stream_, input, output, std::move(what)));
}

void BucketStep::launch_flags(uint8_t fare) {
  flags_.clear_fares();
  flags_.fare(group_->rank()) = abandoned_ ? StepFlags::kAbandoned : fare;
  launch_max("used", flags_.bytes(), DType::uint8);
  if (auto handle = weights_.launch(*group_, stream_)) in_flight_.push_back(std::move(*handle));
}

bool BucketStep::drive(Deadline until, std::optional<Error>& first) {
  if (!wait_for_all(in_flight_, until, first)) return false;
  in_flight_.clear();
  return true;
}

bool BucketStep::drain(Deadline until) {
  try {
    return !step_open() || wait(until);
  } catch (const Error&) {
    group_->check();
    return true;
  }
}

void BucketStep::close_step(bool done) {
  trace_.close();
  if (done) group_->engine()->status().count_step(now());
}

std::vector<int> BucketStep::quitters() {
  std::vector<int> ranks;
  for (int r = 0; r < group_->size(); ++r)
    if (flags_.fare(r) == StepFlags::kAbandoned)
      ranks.push_back(group_->members()[static_cast<size_t>(r)]);
  return ranks;
}

void BucketStep::refuse(const std::vector<int>& quitters, const std::string& what,
                        const std::string& so) const {
  Context where;
  where.rank = quitters.front();
  where.operation = options_.label;
  where.values = {{"abandoned", quitters}};
  throw Error(ErrorCode::remote_error,
              what + " was abandoned on " + name_ranks(quitters) + "; " + so, std::move(where),
              "look at the error on that rank; skip this step on every rank, or restart");
}

// ---- weights ----

void BucketStep::watch_weights(WeightsWatch watch) {
  const std::lock_guard lock(mutex_);
  weights_ = std::move(watch);
}

bool BucketStep::weights_due() const {
  const std::lock_guard lock(mutex_);
  return weights_.due();
}

void BucketStep::show_weights(std::vector<uint64_t> checksums) {
  const std::lock_guard lock(mutex_);
  weights_.show(std::move(checksums));
}

}  // namespace farandole
