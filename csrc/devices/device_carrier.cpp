#include "devices/device_carrier.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "devices/staged_arrays.h"
#include "devices/step_call.h"
#include "engine/fork.h"

namespace farandole {
namespace {

constexpr auto kGone = "the optimizer of these gradients has gone";

}  // namespace

DeviceCarrier::DeviceCarrier(BucketStep& step, int device, std::vector<bool> carried)
    : step_(step),
      rank_(step.group().engine()->host().rank),
      device_(device),
      carried_(std::move(carried)),
      staging_(Staging::of(*step.group().engine())),
      queue_(or_fail_group(step.group(), [&] { return staging_->queue(device); })),
      homes_(carried_.size()),
      pages_(step.buckets().size()) {}

void DeviceCarrier::open_steps(bool without_buckets) {
  Group& group = step_.group();
  if (steps_ || group.engine()->options().device_path == "staged" ||
      !group.defaults().algorithm.empty())
    return;
  const std::string no_buckets = Steps::why_no_buckets(group);
  const bool is_canonical = group.defaults().level == Determinism::canonical;
  if (without_buckets && is_canonical && !no_buckets.empty()) warn_of_level(group, no_buckets);
  if (no_buckets.empty() || (without_buckets && !is_canonical))
    steps_ = Steps::of(group, step_.stream(), device_);
}

bool DeviceCarrier::has_all_of(const Bucket& bucket) const {
  return bucket.count > 0 && std::ranges::all_of(bucket.placements, [&](const Placement& p) {
           return p.count == 0 || carries(static_cast<size_t>(p.parameter));
         });
}

const DevicePages& DeviceCarrier::pages(DevicePages& known, std::byte* memory, size_t bucket) {
  if (!known) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t bytes = step_.buckets()[bucket].bytes();
    known = queue_->register_pages(memory, (bytes + page - 1) / page * page);
  }
  return known;
}

void DeviceCarrier::copy_gradient(const Placement& placement, size_t b) {
  const size_t element = size_of(step_.buckets()[b].dtype);
  Home& home = homes_[static_cast<size_t>(placement.parameter)];
  queue_->copy_to_host(pages(pages_[b], step_.memory(b).get(), b), home.address,
                       placement.count * element, placement.offset * element);
  home.copied = true;
}

void DeviceCarrier::note_returned(uint64_t stream) {
  returned_ = queue_->mark(kToDevice);
  queue_->precede(stream);
}

void DeviceCarrier::wait_for_copies() noexcept {
  if (in_child()) return;
  try {
    for (const CudaWay way : {kToHost, kToDevice}) queue_->synchronize(way);
  } catch (const Error&) {  // NOLINT: of a device that is lost none is under way
  }
}

void DeviceCarrier::release_pages() { std::ranges::fill(pages_, nullptr); }

/// The polling thread may be bringing a bucket to the host.
void DeviceCarrier::end() noexcept {
  if (in_child()) return;  // in which the mutex may be locked for ever
  const std::lock_guard lock(mutex_);
  ended_ = true;
  wait_for_copies();
  release_pages();
}

// ---- when a bucket is launched ----

Carried DeviceCarrier::launch(size_t b) {
  if (std::ranges::none_of(step_.buckets()[b].placements, [&](const Placement& p) {
        return carries(static_cast<size_t>(p.parameter));
      }))
    return {};
  return or_fail_group(step_.group(), [&]() -> Carried {
    const std::lock_guard lock(mutex_);
    if (auto on_device = leave_on_device(b)) return {nullptr, std::move(on_device)};
    return {bring_to_host(b)};
  });
}

std::shared_ptr<BucketOnDevice> DeviceCarrier::make_on_device(size_t b) {
  auto to_host = [weak = weak_from_this(), b](Operation& operation, BucketOnDevice& on_device,
                                              bool mixed) {
    const auto self = weak.lock();
    if (!self) throw Error(ErrorCode::aborted, kGone);
    self->go_by_host(b, operation, on_device, mixed);
  };
  return std::make_shared<BucketOnDevice>(steps_, std::move(to_host));
}

std::shared_ptr<Gate> DeviceCarrier::bring_gradients(size_t b, bool more) {
  const Bucket& bucket = step_.buckets()[b];
  auto gate = std::make_shared<BucketArrival>(staging_, queue_, rank_, bucket.dtype,
                                              step_.copied_prescale(b));
  std::byte* const memory = step_.memory(b).get();
  CopiesUntil until{.has_to_host = more, .has_to_device = returned_.has_value()};
  for (const Placement& p : bucket.placements) {
    const auto i = static_cast<size_t>(p.parameter);
    if (!carries(i)) continue;
    if (homes_[i].brought && !homes_[i].copied) copy_gradient(p, b);
    until.has_to_host |= homes_[i].brought;
    gate->add(memory + p.offset * size_of(bucket.dtype), p.count, homes_[i].brought,
              homes_[i].owner);
  }
  if (until.has_to_host) until.to_host = queue_->mark(kToHost);
  until.to_device = returned_.value_or(0);
  gate->open_after(until);
  return gate;
}

/// By the thread that polls.
void DeviceCarrier::go_by_host(size_t b, Operation& operation, BucketOnDevice& on_device,
                               bool mixed) {
  try {
    const std::lock_guard lock(mutex_);
    if (ended_) throw Error(ErrorCode::aborted, kGone);
    give_up(b, on_device, mixed);
    operation.gate = bring_to_host(b);
  } catch (const Error& error) {
    throw on_rank(error, rank_);
  }
}

}  // namespace farandole
