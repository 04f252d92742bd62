#include "devices/device_gradients.h"

#include <algorithm>
#include <utility>

#include "devices/staged_arrays.h"
#include "devices/step_call.h"

namespace farandole {
namespace {

/// A bucket that some rank had elsewhere is tried by steps again when this divides the number of
/// its launches: on all ranks at once, whichever of them have noticed.
constexpr uint64_t kLaunchesBetweenTries = 16;

}  // namespace

DeviceGradients::DeviceGradients(Reducer& reducer, int device, std::vector<bool> carried)
    : DeviceCarrier(reducer, device, std::move(carried)), reducer_(reducer) {
  check_level_of_way(reducer.group(), CollectiveSpec{Collective::all_reduce});
  look_at_buckets();
}

void DeviceGradients::look_at_buckets() {
  buckets_.clear();
  bool any = false;
  for (const Bucket& bucket : reducer_.buckets())
    any |= buckets_.emplace_back().on_device = has_all_of(bucket);
  if (any) open_steps(true);
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
      if (p.parameter == parameter) copy_gradient(p, b);
  };
  reducer_.mark_carried(parameter, [&] { or_fail_group(reducer_.group(), begin); }, sparse_dims);
}

// ---- when a bucket is launched ----

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
  BucketState& state = buckets_[b];
  const bool tries = may_stay(state), stays = tries && is_whole(bucket);
  ++state.launches;
  if (tries && !stays) try_later(state);
  state.by_steps = stays ? make_on_device(b) : nullptr;
  if (!stays) return nullptr;
  state.by_steps->reduce_in_place(reducer_.copied_prescale(b));
  for (const Placement& p : bucket.placements) {
    Home& home = homes_[static_cast<size_t>(p.parameter)];
    state.by_steps->add(bucket, p, home.address);
    if (p.count > 0) state.by_steps->follow(home.stream);
    state.by_steps->keep(std::move(home.owner));
    home.brought = false;
  }
  state.by_steps->seal();
  return state.by_steps;
}

void DeviceGradients::give_up(size_t b, BucketOnDevice& by_steps, bool mixed) {
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
}

std::shared_ptr<Gate> DeviceGradients::bring_to_host(size_t b) {
  auto gate = bring_gradients(b, false);
  for (const Placement& p : reducer_.buckets()[b].placements) {
    Home& home = homes_[static_cast<size_t>(p.parameter)];
    home.owner = nullptr;
    home.brought = home.copied = false;
  }
  return gate;
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
    queue_->copy_to_device(homes_[i].address, pages_[at.bucket], p.count * size_of(p.dtype),
                           at.offset);
    copied = true;
  }
  if (copied) note_returned(stream);
}

void DeviceGradients::let_go() {
  const std::lock_guard lock(mutex_);
  wait_for_copies();
  pages_ = std::vector<DevicePages>(reducer_.buckets().size());
  look_at_buckets();
  returned_.reset();
}

}  // namespace farandole
