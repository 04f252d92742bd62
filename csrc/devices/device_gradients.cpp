#include "devices/device_gradients.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "devices/staged_arrays.h"
#include "devices/step_call.h"
#include "engine/fork.h"

namespace farandole {
namespace {

/// A bucket that some rank had elsewhere is tried by steps again when this divides the number of
/// its launches: on all ranks at once, whichever of them have noticed.
constexpr uint64_t kLaunchesBetweenTries = 16;

size_t bytes_of(const Placement& p, const Bucket& bucket) {
  return p.count * size_of(bucket.dtype);
}

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

/// Null where a setting rules steps out, or gradients of another device of this rank have them.
std::shared_ptr<Steps> steps_of(const Reducer& reducer, int device) {
  Group& group = reducer.group();
  if (group.engine()->options().device_path == "staged" || !group.defaults().algorithm.empty())
    return nullptr;
  // Where devices share no buckets there is NCCL alone.
  const std::string no_buckets = Steps::why_no_buckets(group);
  if (group.defaults().level == Determinism::canonical && !no_buckets.empty()) {
    warn_of_level(group, no_buckets);
    return nullptr;
  }
  return Steps::of(group, reducer.stream(), device);
}

}  // namespace

DeviceGradients::DeviceGradients(Reducer& reducer, int device, std::vector<bool> carried)
    : reducer_(reducer),
      device_(device),
      carried_(std::move(carried)),
      staging_(Staging::of(*reducer.group().engine())),
      queue_(or_fail_group(reducer.group(), [&] { return staging_->queue(device); })),
      homes_(carried_.size()) {
  check_level_of_way(reducer.group(), CollectiveSpec{Collective::all_reduce});
  look_at_buckets();
}

DeviceGradients::~DeviceGradients() { wait_for_copies(); }

void DeviceGradients::look_at_buckets() {
  buckets_.clear();
  bool any = false;
  for (const Bucket& bucket : reducer_.buckets()) {
    BucketState& state = buckets_.emplace_back();
    state.on_device =
        bucket.count > 0 && std::ranges::all_of(bucket.placements, [&](const Placement& p) {
          return p.count == 0 || carries(static_cast<size_t>(p.parameter));
        });
    any |= state.on_device;
  }
  if (any && !steps_) steps_ = steps_of(reducer_, device_);
}

void DeviceGradients::bring(int parameter, uint64_t address, uint64_t stream,
                            std::shared_ptr<const void> owner, int sparse_dims) {
  const auto i = static_cast<size_t>(parameter);
  const auto begin = [&] {
    const std::lock_guard lock(mutex_);
    queue_->follow(stream);
    homes_[i] = {.address = address, .stream = stream, .owner = std::move(owner), .brought = true};
    const size_t b = reducer_.places()[i].bucket;
    if (may_stay(buckets_[b])) return;
    for (const Placement& p : reducer_.buckets()[b].placements)
      if (p.parameter == parameter) copy_to_host(p, b);
  };
  reducer_.mark_carried(parameter, [&] { or_fail_group(reducer_.group(), begin); }, sparse_dims);
}

void DeviceGradients::copy_to_host(const Placement& placement, size_t b) {
  const Bucket& bucket = reducer_.buckets()[b];
  DevicePages& pages = buckets_[b].pages;
  if (!pages) pages = queue_->register_pages(reducer_.memory(b).get(), whole_pages(bucket.bytes()));
  Home& home = homes_[static_cast<size_t>(placement.parameter)];
  queue_->copy_to_host(pages, home.address, bytes_of(placement, bucket),
                       placement.offset * size_of(bucket.dtype));
  home.copied = true;
}

// ---- when a bucket is launched ----

Carried DeviceGradients::launch(size_t b) {
  const Bucket& bucket = reducer_.buckets()[b];
  if (std::ranges::none_of(bucket.placements, [&](const Placement& p) {
        return carries(static_cast<size_t>(p.parameter));
      }))
    return {};
  return or_fail_group(reducer_.group(), [&]() -> Carried {
    reducer_.memory(b);  // made early: the bucket may go by the host after all
    const std::lock_guard lock(mutex_);
    BucketState& state = buckets_[b];
    const bool tries = may_stay(state), stays = tries && is_whole(bucket);
    ++state.launches;
    if (tries && !stays) try_later(state);
    state.by_steps = stays ? leave_on_device(b) : nullptr;
    if (stays) return {nullptr, state.by_steps};
    return {bring_to_host(b)};
  });
}

/// Whether this bucket's gradients are left on the device, in the step that is open.
bool DeviceGradients::may_stay(const BucketState& state) const {
  return steps_ && state.on_device && !state.never_by_steps && state.launches >= state.next_try;
}

void DeviceGradients::try_later(BucketState& state) {
  constexpr uint64_t n = kLaunchesBetweenTries;
  state.next_try = (state.launches + n - 1) / n * n;
}

/// Whether there is a gradient of each of its parameters.
bool DeviceGradients::is_whole(const Bucket& bucket) const {
  return std::ranges::all_of(bucket.placements, [&](const Placement& p) {
    return p.count == 0 || homes_[static_cast<size_t>(p.parameter)].brought;
  });
}

std::shared_ptr<BucketOnDevice> DeviceGradients::leave_on_device(size_t b) {
  const Bucket& bucket = reducer_.buckets()[b];
  auto to_host = [weak = weak_from_this(), b](Operation& operation, BucketOnDevice& by_steps,
                                              bool mixed) {
    const auto self = weak.lock();
    if (!self) throw Error(ErrorCode::aborted, "the optimizer of these gradients has gone");
    self->go_by_host(b, operation, by_steps, mixed);
  };
  auto by_steps =
      std::make_shared<BucketOnDevice>(steps_, reducer_.copied_prescale(b), std::move(to_host));
  for (const Placement& p : bucket.placements) {
    Home& home = homes_[static_cast<size_t>(p.parameter)];
    by_steps->add(bucket, p, home.address, home.stream, std::move(home.owner));
    home.brought = false;
  }
  by_steps->seal();
  return by_steps;
}

/// Starts the copies of a bucket to the host. Returns the gate that waits for them.
std::shared_ptr<Gate> DeviceGradients::bring_to_host(size_t b) {
  const Bucket& bucket = reducer_.buckets()[b];
  auto gate =
      std::make_shared<BucketArrival>(staging_, queue_, reducer_.group().engine()->host().rank,
                                      bucket.dtype, reducer_.copied_prescale(b));
  std::byte* const memory = reducer_.memory(b).get();
  CopiesUntil until;
  for (const Placement& p : bucket.placements) {
    if (!carries(static_cast<size_t>(p.parameter))) continue;
    Home& home = homes_[static_cast<size_t>(p.parameter)];
    if (home.brought && !home.copied) copy_to_host(p, b);
    until.has_to_host |= home.brought;
    gate->add(memory + p.offset * size_of(bucket.dtype), p.count, home.brought,
              std::move(home.owner));
    home.brought = home.copied = false;
  }
  if (until.has_to_host) until.to_host = queue_->mark(kToHost);
  until.has_to_device = returned_.has_value();
  until.to_device = returned_.value_or(0);
  gate->open_after(until);
  return gate;
}

/// By the thread that polls.
void DeviceGradients::go_by_host(size_t b, Operation& operation, BucketOnDevice& by_steps,
                                 bool mixed) {
  try {
    const std::lock_guard lock(mutex_);
    BucketState& state = buckets_[b];
    state.never_by_steps |= !mixed;
    try_later(state);
    auto owners = by_steps.take_owners();
    for (size_t i = 0; i < owners.size(); ++i) {
      const Placement& p = reducer_.buckets()[b].placements[i];
      Home& home = homes_[static_cast<size_t>(p.parameter)];
      home.owner = std::move(owners[i]);
      home.brought = p.count > 0;
    }
    operation.gate = bring_to_host(b);
  } catch (const Error& error) {
    throw on_rank(error, reducer_.group().engine()->host().rank);
  }
}

// ---- when the step's buckets are reduced ----

void DeviceGradients::take_back(std::span<const int> parameters, uint64_t stream) {
  std::vector<std::shared_ptr<BucketOnDevice>> launched;  // in order: the last is after all
  or_fail_group(reducer_.group(), [&] {
    const std::lock_guard lock(mutex_);
    copy_back(parameters, stream);
    for (BucketState& state : buckets_) {
      auto by_steps = std::exchange(state.by_steps, nullptr);
      if (by_steps && by_steps->launched()) launched.push_back(std::move(by_steps));
    }
  });
  if (launched.empty()) return;
  launched.back()->hand_over(stream);
  for (const auto& by_steps : launched) by_steps->let_go(stream);
}

void DeviceGradients::copy_back(std::span<const int> parameters, uint64_t stream) {
  bool copied = false;
  for (const int parameter : parameters) {
    const auto i = static_cast<size_t>(parameter);
    const BucketPlace at = reducer_.places()[i];
    const BucketState& state = buckets_[at.bucket];
    const Parameter& p = reducer_.parameters()[i];
    if (p.count == 0 || (state.by_steps && state.by_steps->launched())) continue;  // never left
    queue_->copy_to_device(homes_[i].address, state.pages, p.count * size_of(p.dtype), at.offset);
    copied = true;
  }
  if (!copied) return;
  returned_ = queue_->mark(kToDevice);
  queue_->precede(stream);
}

void DeviceGradients::let_go() {
  const std::lock_guard lock(mutex_);
  wait_for_copies();
  look_at_buckets();
  returned_.reset();
}

void DeviceGradients::wait_for_copies() noexcept {
  if (in_child()) return;
  try {
    for (const CudaWay way : {kToHost, kToDevice}) queue_->synchronize(way);
  } catch (const Error&) {  // NOLINT: of a device that is lost none is under way
  }
}

}  // namespace farandole
