#include "devices/device_shards.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "devices/device_bucket.h"
#include "devices/staged_arrays.h"
#include "engine/fork.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

constexpr auto kBetweenArrivalLooks = std::chrono::microseconds(50);
constexpr auto kBetweenInterruptions = std::chrono::milliseconds(50);

/// Null where a setting rules steps out, or none would fold in the host's order.
std::shared_ptr<Steps> steps_of(const ShardedUpdate& update, int device) {
  Group& group = update.group();
  if (update.over_hosts() || group.engine()->options().device_path == "staged" ||
      !group.defaults().algorithm.empty() || !Steps::why_no_buckets(group).empty())
    return nullptr;
  return Steps::of(group, update.stream(), device);
}

}  // namespace

DeviceShards::DeviceShards(ShardedUpdate& update, int device, std::vector<bool> carried,
                           std::function<void()> interrupted)
    : update_(update),
      interrupted_(std::move(interrupted)),
      staging_(Staging::of(*update.group().engine())),
      queue_(or_fail_group(update.group(), [&] { return staging_->queue(device); })),
      homes_(update.places().size()) {
  bool any = false;
  for (const Bucket& bucket : update.buckets()) {
    BucketState& state = buckets_.emplace_back();
    state.stays = bucket.count > 0;
    for (const Placement& p : bucket.placements) {
      const auto i = static_cast<size_t>(p.parameter);
      const BucketPlace& place = update.places()[i];
      homes_[i].bucket = place.bucket;
      homes_[i].offset = place.offset;
      homes_[i].count = p.count;
      homes_[i].element = size_of(bucket.dtype);
      state.stays &= p.count == 0 || carried[i];
    }
    any |= state.stays;
  }
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const Placement& p : update.buckets()[b].placements)
      buckets_[b].most_terms += terms_of(b, p);
  if (any) steps_ = steps_of(update, device);
  for (BucketState& state : buckets_) state.stays &= steps_ != nullptr;
  alive_->shards = this;
  update_.add_carrier(*this);
}

DeviceShards::~DeviceShards() {
  {
    const std::lock_guard lock(alive_->mutex);
    alive_->shards = nullptr;
  }
  update_.drop_carrier(*this);
  if (in_child()) return;
  try {
    for (const CudaWay way : {kToHost, kToDevice}) queue_->synchronize(way);
  } catch (const Error&) {  // NOLINT: of a device that is lost none is under way
  }
}

const DevicePages& DeviceShards::pages(DevicePages& known, std::byte* memory, size_t bucket) {
  if (!known) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t bytes = (update_.buckets()[bucket].bytes() + page - 1) / page * page;
    known = queue_->register_pages(memory, bytes);
  }
  return known;
}

/// This rank's part of a bucket.
Slice DeviceShards::mine(size_t bucket) const {
  return part_of(update_.buckets()[bucket], update_.group().size(), update_.group().rank());
}

// ---- before a task ----

void DeviceShards::bring(size_t parameter, uint64_t address, uint64_t stream,
                         std::shared_ptr<const void> owner) {
  or_fail_group(update_.group(), [&] {
    Home& home = homes_[parameter];
    queue_->follow(stream);
    if (home.owner && home.copied) let_go(std::move(home.owner));
    home.gradient = address;
    home.gradient_stream = stream;
    home.owner = std::move(owner);
    home.copied = false;
    if (!buckets_[home.bucket].stays) copy_gradient(home);
  });
  update_.note_taken();
}

void DeviceShards::copy_gradient(Home& home) {
  const DevicePages& to =
      pages(buckets_[home.bucket].gradients, update_.memory(home.bucket).get(), home.bucket);
  queue_->copy_to_host(to, home.gradient, home.count * home.element, home.offset);
  home.copied = arriving_ = true;
}

/// Keeps the array until it is copied: its gradient came a second time before it was needed.
void DeviceShards::let_go(std::shared_ptr<const void> owner) {
  CopiesUntil until;
  until.has_to_host = true;
  until.to_host = queue_->mark(kToHost);
  staging_->keep(std::move(owner), queue_, until);
}

void DeviceShards::bring_value(size_t parameter, uint64_t address, uint64_t stream) {
  or_fail_group(update_.group(), [&] {
    Home& home = homes_[parameter];
    queue_->follow(stream);
    home.value_stream = stream;
    home.value = address;
    if (!buckets_[home.bucket].stays) copy_value(home);
  });
}

/// Copies as much of the value as is in this rank's part.
void DeviceShards::copy_value(const Home& home) {
  const Slice part = mine(home.bucket);
  const size_t begin = home.offset / home.element;
  const Slice inside = clip(part, {part.space, begin, home.count});
  if (inside.count == 0) return;
  const DevicePages& to =
      pages(buckets_[home.bucket].values, update_.values(home.bucket).get(), home.bucket);
  queue_->copy_to_host(to, home.value + (inside.offset - begin) * home.element,
                       inside.count * home.element, inside.offset * home.element);
  arriving_ = true;
}

void DeviceShards::bring_all() {
  or_fail_group(update_.group(), [&] {
    for (Home& home : homes_)
      if (home.owner && !home.copied && !takes_norm(home.bucket)) copy_gradient(home);
  });
}

void DeviceShards::arrive() {
  Group& group = update_.group();
  if (!arriving_ && !returning_) return;
  CopiesUntil until{.has_to_host = arriving_, .has_to_device = returning_};
  or_fail_group(group, [&] {
    if (arriving_) until.to_host = queue_->mark(kToHost);
    if (returning_) until.to_device = queue_->mark(kToDevice);
  });
  const TimePoint begin = now();
  TimePoint next_interruption = begin + kBetweenInterruptions;
  LossWatch watch;
  while (!until.reached(*queue_)) {
    group.check();
    if (watch.due()) or_fail_group(group, [&] { queue_->look_for_loss(); });
    const TimePoint when = now();
    if (group.defaults().timeout > Duration::zero() && when - begin > group.defaults().timeout)
      or_fail_group(group, [&]() -> int {
        throw Error(ErrorCode::stalled, "gradients on device " + std::to_string(queue_->device()) +
                                            " did not come to the host in time");
      });
    if (when >= next_interruption) {
      interrupted_();
      next_interruption = when + kBetweenInterruptions;
    }
    std::this_thread::sleep_for(kBetweenArrivalLooks);
  }
  arriving_ = returning_ = false;
  for (Home& home : homes_)
    if (!buckets_[home.bucket].stays) home.owner = nullptr;
}

// ---- a norm on the device ----

/// The number of a parameter's terms in this rank's part.
size_t DeviceShards::terms_of(size_t b, const Placement& at) const {
  const Slice part = mine(b), here = clip(part, {part.space, at.offset, at.count});
  const size_t tile = kEpilogueBytes / size_of(update_.buckets()[b].dtype);
  return tiles_of((here.offset - part.offset) % tile, here.count, tile);
}

/// Requires that pieces have whole tiles, and that terms fit the values' memory on the host.
bool DeviceShards::takes_norm(size_t b) const {
  const BucketState& state = buckets_[b];
  const size_t piece = update_.group().engine()->options().device_bucket_bytes;
  return state.stays && state.most_terms * sizeof(double) <= update_.buckets()[b].bytes() &&
         piece / static_cast<size_t>(update_.group().size()) >= kEpilogueBytes;
}

std::shared_ptr<OnDevices> DeviceShards::launch_norm(size_t b, const Shard& shard, Norm norm) {
  BucketState& state = buckets_[b];
  if (!takes_norm(b)) return nullptr;
  return or_fail_group(update_.group(), [&]() -> std::shared_ptr<OnDevices> {
    const Bucket& bucket = update_.buckets()[b];
    if (state.terms.address == 0)
      state.terms = queue_->allocate(std::max<size_t>(state.most_terms, 1) * sizeof(double));
    auto made = make_update(b);
    state.new_terms = 0;
    for (size_t k = 0; k < bucket.placements.size(); ++k) {
      const Placement& at = bucket.placements[k];
      if (shard.updates[k].skipped) continue;
      made->add(bucket, at, gradient_of(static_cast<size_t>(at.parameter), *made));
      state.new_terms += terms_of(b, at);
    }
    if (made->empty()) return nullptr;  // so it is on all ranks
    made->take_norm(state.terms.address, norm == Norm::infinite);
    made->keep(state.terms.memory);
    made->seal();
    return state.norm = made;
  });
}

void DeviceShards::finish_norm(size_t b, PartNorm& norm) {
  BucketState& state = buckets_[b];
  const auto made = std::exchange(state.norm, nullptr);
  if (!made || !made->launched()) return;  // the host has made it
  made->hand_over(std::nullopt);
  if (state.new_terms == 0) return;
  or_fail_group(update_.group(), [&] {
    const DevicePages& through = pages(state.values, update_.values(b).get(), b);
    queue_->copy_to_host(through, state.terms.address, state.new_terms * sizeof(double));
    queue_->synchronize(kToHost);
  });
  const std::byte* const memory = update_.values(b).get();
  for (size_t i = 0; i < state.new_terms; ++i) {
    double term = 0;
    std::memcpy(&term, memory + i * sizeof term, sizeof term);
    norm.add(term);
  }
}

// ---- an update on the device ----

std::shared_ptr<OnDevices> DeviceShards::launch(size_t b, Shard& shard) {
  BucketState& state = buckets_[b];
  if (!state.stays) return nullptr;
  return or_fail_group(update_.group(), [&]() -> std::shared_ptr<OnDevices> {
    make_state(b, shard);
    const Bucket& bucket = update_.buckets()[b];
    uint64_t addresses[kMostSlots] = {};
    for (size_t s = 0; s < state.state.size(); ++s) addresses[s] = state.state[s].address;
    auto made = make_update(b);
    for (size_t k = 0; k < bucket.placements.size(); ++k) {
      const Placement& at = bucket.placements[k];
      const auto i = static_cast<size_t>(at.parameter);
      if (shard.updates[k].skipped) continue;
      const uint64_t gradient = gradient_of(i, *made);
      made->add(bucket, at, shard.updates[k], gradient, homes_[i].value, addresses);
      made->follow(homes_[i].value_stream);
    }
    if (made->empty()) return nullptr;  // so it is on all ranks
    for (const DeviceRoom& room : state.state) made->keep(room.memory);
    made->seal();
    return state.newest = made;
  });
}

std::shared_ptr<DeviceUpdate> DeviceShards::make_update(size_t b) {
  auto to_host = [alive = alive_, b](Operation& operation) {
    const std::lock_guard lock(alive->mutex);
    if (alive->shards == nullptr)
      throw Error(ErrorCode::aborted, "the optimizer of these parameters has gone");
    alive->shards->go_by_host(b, operation);
  };
  return std::make_shared<DeviceUpdate>(steps_, std::move(to_host));
}

/// The gradient's address, or that of zeros where this rank has none.
uint64_t DeviceShards::gradient_of(size_t parameter, DeviceUpdate& made) {
  const Home& home = homes_[parameter];
  const bool here = update_.is_present(parameter);  // what was brought may be of a step given up
  const uint64_t gradient = here ? home.gradient : zeros(home.count * home.element);
  if (!here) made.keep(zeros_.memory);  // there may be longer ones soon
  if (here) made.follow(home.gradient_stream);
  made.keep(home.owner);
  return gradient;
}

/// Allocates the state on the device, and fills it with the host's.
void DeviceShards::make_state(size_t b, Shard& shard) {
  BucketState& state = buckets_[b];
  if (!state.state.empty() || shard.slots() == 0) return;
  for (size_t s = 0; s < shard.slots(); ++s)
    state.state.push_back(queue_->allocate(std::max<size_t>(shard.bytes(), 1)));
  copy_state(b, shard, kToDevice);
}

/// By way of the values' memory on the host, unused while the bucket is updated on the device.
void DeviceShards::copy_state(size_t b, Shard& shard, CudaWay way) {
  const DevicePages& through = pages(buckets_[b].values, update_.values(b).get(), b);
  std::byte* const memory = update_.values(b).get();
  for (size_t s = 0; s < shard.slots() && shard.bytes() > 0; ++s) {
    const uint64_t there = buckets_[b].state[s].address;
    if (way == kToDevice) {
      std::memcpy(memory, shard.state(s), shard.bytes());
      queue_->copy_to_device(there, through, shard.bytes());
    } else {
      queue_->copy_to_host(through, there, shard.bytes());
    }
    queue_->synchronize(way);
    if (way == kToHost) std::memcpy(shard.state(s), memory, shard.bytes());
  }
}

uint64_t DeviceShards::zeros(size_t bytes) {
  if (bytes > zero_bytes_) {
    zeros_ = queue_->allocate(bytes);
    zero_bytes_ = bytes;
  }
  return zeros_.address;
}

/// By the thread that polls, at a bucket's first update. The bucket stays with the host then.
void DeviceShards::go_by_host(size_t b, Operation& operation) {
  const int rank = update_.group().engine()->host().rank;
  try {
    BucketState& state = buckets_[b];
    state.stays = false;
    state.state.clear();
    state.newest = state.norm = nullptr;
    const Bucket& bucket = update_.buckets()[b];
    auto gate = std::make_shared<BucketArrival>(staging_, queue_, rank, bucket.dtype, 1);
    for (const Placement& p : bucket.placements) {
      Home& home = homes_[static_cast<size_t>(p.parameter)];
      if (home.value != 0) copy_value(home);
      if (!home.owner || !update_.is_present(static_cast<size_t>(p.parameter))) continue;
      if (!home.copied) copy_gradient(home);
      gate->add(update_.memory(b).get() + home.offset, p.count, true, std::move(home.owner));
    }
    CopiesUntil until{.has_to_host = true};
    until.to_host = queue_->mark(kToHost);
    gate->open_after(until);
    operation.gate = gate;
  } catch (const Error& error) {
    throw on_rank(error, rank);
  }
}

// ---- after an update ----

void DeviceShards::take_back(std::span<const std::pair<size_t, uint64_t>> values, uint64_t stream) {
  or_fail_group(update_.group(), [&] {
    for (const auto& [parameter, address] : values) {
      const Home& home = homes_[parameter];
      BucketState& state = buckets_[home.bucket];
      if (state.stays) continue;
      const DevicePages& from = pages(state.values, update_.values(home.bucket).get(), home.bucket);
      queue_->copy_to_device(address, from, home.count * home.element, home.offset);
      returning_ = true;
    }
    if (returning_) queue_->precede(stream);
  });
  for (const BucketState& state : buckets_)
    if (state.newest) state.newest->hand_over(stream);
  for (Home& home : homes_) home.owner = nullptr;  // what is under way keeps its own
}

// ---- the state ----

void DeviceShards::fetch_state(size_t b, Shard& shard) {
  BucketState& state = buckets_[b];
  if (state.state.empty()) return;
  if (state.newest) state.newest->hand_over(std::nullopt);
  or_fail_group(update_.group(), [&] { copy_state(b, shard, kToHost); });
}

void DeviceShards::replace_state(size_t b, Shard& shard) {
  if (buckets_[b].state.empty()) return;
  or_fail_group(update_.group(), [&] { copy_state(b, shard, kToDevice); });
}

}  // namespace farandole
