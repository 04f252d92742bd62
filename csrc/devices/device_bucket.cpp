#include "devices/device_bucket.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "devices/staged_copies.h"
#include "fold/fold.h"

namespace farandole {

// ---- on the way to the host ----

BucketArrival::~BucketArrival() {
  if (is_open_) return;  // otherwise its group has failed
  for (auto& owner : owners_) staging_->keep(std::move(owner), queue_, until_);
}

void BucketArrival::add(std::byte* place, size_t count, bool brought,
                        std::shared_ptr<const void> owner) {
  slots_.push_back({place, count, brought});
  if (owner) owners_.push_back(std::move(owner));
}

bool BucketArrival::is_open() {
  if (is_open_) return true;
  if (!until_.reached(*queue_)) {
    if (watch_.due()) look_for_loss();
    return false;
  }
  for (const Slot& slot : slots_) fill(slot);
  owners_.clear();
  return is_open_ = true;
}

std::string BucketArrival::awaited() const {
  return "its gradients on device " + std::to_string(queue_->device());
}

/// Zeros a missing gradient, and prescales one that was copied.
void BucketArrival::fill(const Slot& slot) const {
  if (!slot.brought)
    std::memset(slot.place, 0, slot.count * size_of(dtype_));
  else if (prescale_ != 1)
    scale(slot.place, slot.place, slot.count, dtype_, {prescale_, 1});
}

void BucketArrival::look_for_loss() {
  try {
    queue_->look_for_loss();
  } catch (const Error& error) {
    throw on_rank(error, rank_);
  }
}

// ---- where they lie ----

BucketOnDevice::BucketOnDevice(std::shared_ptr<Steps> steps, ToHost to_host)
    : steps_(std::move(steps)), to_host_(std::move(to_host)) {
  const auto owners = std::make_shared<Owners>();
  owners_ = owners;
  arrays_.kept = owners;
}

void BucketOnDevice::reduce_in_place(double prescale) {
  arrays_.in_place = true;
  arrays_.prescale = prescale;
}

void BucketOnDevice::add(const Bucket& bucket, const Placement& at, uint64_t gradient) {
  if (at.count == 0) return;
  if (at.count == bucket.count) {  // all of it
    arrays_.input = arrays_.output = gradient;
    return;
  }
  const size_t element = size_of(bucket.dtype);
  for (Stretches* all : {&arrays_.inputs, &arrays_.outputs}) {
    all->skip_to(at.offset * element);
    all->add(gradient, at.count * element);
  }
  const Buffer there{std::bit_cast<std::byte*>(gradient), at.count, bucket.dtype};
  arrays_.together.push_back({there, there});
}

void BucketOnDevice::look_at(const Bucket& bucket, const Placement& at, uint64_t gradient) {
  if (at.count == 0) return;
  const size_t element = size_of(bucket.dtype);
  arrays_.inputs.skip_to(at.offset * element);
  arrays_.inputs.add(gradient, at.count * element);
  arrays_.updates.emplace_back().whole = {Space::input, at.offset, at.count};
}

void BucketOnDevice::update(const Bucket& bucket, const Placement& at,
                            const ParameterUpdate& update, uint64_t gradient, uint64_t value,
                            const uint64_t (&state)[kMostSlots]) {
  if (at.count == 0) return;
  look_at(bucket, at, gradient);
  const size_t element = size_of(bucket.dtype);
  arrays_.outputs.skip_to(at.offset * element);
  arrays_.outputs.add(value, at.count * element);
  StepUpdate& added = arrays_.updates.back();
  added.value = value;
  std::ranges::copy(state, added.state);
  added.kind = update.kind;
  added.factors = update.factors;
}

void BucketOnDevice::let_go(uint64_t stream) {
  if (streams_ == std::set{stream}) take_owners();
}

BucketOnDevice::Owners BucketOnDevice::take_owners() {
  const auto owners = owners_.lock();
  return owners ? std::move(*owners) : Owners();
}

Backend& BucketOnDevice::backend() {
  steps_->backend().take(arrays_);
  return steps_->backend();
}

std::shared_ptr<PiecesOnDevices> BucketOnDevice::go_by_host(Operation& operation, size_t) {
  to_host_(operation, *this, steps_->backend().declined().empty());
  return nullptr;
}

}  // namespace farandole
