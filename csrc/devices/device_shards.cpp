#include "devices/device_shards.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "devices/staged_arrays.h"
#include "schedule/slicing.h"

namespace farandole {

DeviceShards::DeviceShards(ShardedUpdate& update, int device, std::vector<bool> carried)
    : DeviceCarrier(update, device, std::move(carried)),
      update_(update),
      values_(homes_.size()),
      buckets_(update.buckets().size()) {
  const bool any = std::ranges::any_of(update.buckets(),
                                       [&](const Bucket& bucket) { return has_all_of(bucket); });
  if (any && !update.over_hosts()) open_steps(false);  // others do not fold in the host's order
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = update.buckets()[b];
    buckets_[b].stays = steps_ && has_all_of(bucket);
    for (const Placement& p : bucket.placements) buckets_[b].most_terms += terms_of(b, p);
  }
}

const DevicePages& DeviceShards::value_pages(size_t b) {
  return pages(buckets_[b].values, update_.values(b).get(), b);
}

/// This rank's part of a bucket.
Slice DeviceShards::mine(size_t bucket) const {
  return part_of(update_.buckets()[bucket], update_.group().size(), update_.group().rank());
}

// ---- before a task ----

void DeviceShards::bring(size_t parameter, uint64_t address, uint64_t stream,
                         std::shared_ptr<const void> owner) {
  or_fail_group(update_.group(), [&] {
    const std::lock_guard lock(mutex_);
    Home& home = homes_[parameter];
    queue_->follow(stream);
    if (home.owner && home.copied) {  // it came a second time before it was needed
      CopiesUntil until{.has_to_host = true};
      until.to_host = queue_->mark(kToHost);
      staging_->keep(std::move(home.owner), queue_, until);
    }
    home = {.address = address, .stream = stream, .owner = std::move(owner)};
    const size_t b = update_.places()[parameter].bucket;
    if (buckets_[b].stays) return;
    for (const Placement& p : update_.buckets()[b].placements)
      if (static_cast<size_t>(p.parameter) == parameter) copy_gradient(p, b);
  });
  update_.note_taken();
}

void DeviceShards::bring_value(size_t parameter, uint64_t address, uint64_t stream) {
  or_fail_group(update_.group(), [&] { queue_->follow(stream); });
  values_[parameter] = {address, stream};
}

/// Copies as much of the value as is in this rank's part.
void DeviceShards::copy_value(const Placement& at, size_t b) {
  const size_t element = size_of(update_.buckets()[b].dtype);
  const Slice part = mine(b), inside = clip(part, {part.space, at.offset, at.count});
  if (inside.count == 0) return;
  const uint64_t from = values_[static_cast<size_t>(at.parameter)].address;
  queue_->copy_to_host(value_pages(b), from + (inside.offset - at.offset) * element,
                       inside.count * element, inside.offset * element);
}

// ---- when a bucket is launched ----

std::shared_ptr<BucketOnDevice> DeviceShards::leave_on_device(size_t b) {
  for (const Placement& p : update_.buckets()[b].placements) {
    const auto i = static_cast<size_t>(p.parameter);
    homes_[i].brought = update_.is_present(i);  // what was brought may be of a step given up
  }
  const bool updates = update_.task() == ShardedUpdate::Task::update;
  if (!buckets_[b].stays || !(updates || takes_norm(b))) return nullptr;
  return updates ? update_there(b) : norm_there(b);
}

/// At a bucket's first task. The bucket stays with the host then.
void DeviceShards::give_up(size_t b, BucketOnDevice&, bool) {
  BucketState& state = buckets_[b];
  state.stays = false;
  state.state.clear();
  state.newest = state.norm = nullptr;
}

std::shared_ptr<Gate> DeviceShards::bring_to_host(size_t b) {
  const bool updates = update_.task() == ShardedUpdate::Task::update;
  if (updates)
    for (const Placement& p : update_.buckets()[b].placements)
      if (carries(static_cast<size_t>(p.parameter))) copy_value(p, b);
  return bring_gradients(b, updates);
}

void DeviceShards::release_pages() {
  DeviceCarrier::release_pages();
  for (BucketState& state : buckets_) state.values = nullptr;
}

std::shared_ptr<BucketOnDevice> DeviceShards::update_there(size_t b) {
  Shard& shard = update_.shard(b);
  make_state(b, shard);
  BucketState& state = buckets_[b];
  uint64_t addresses[kMostSlots] = {};
  for (size_t s = 0; s < state.state.size(); ++s) addresses[s] = state.state[s].address;
  auto made = make_on_device(b);
  for (size_t k = 0; k < shard.updates.size(); ++k) {
    if (shard.updates[k].skipped) continue;
    const Placement& at = shard.bucket().placements[k];
    const Value& value = values_[static_cast<size_t>(at.parameter)];
    made->update(shard.bucket(), at, shard.updates[k], gradient_of(at, b, *made), value.address,
                 addresses);
    made->follow(value.stream);
  }
  if (made->updates_none()) return nullptr;  // so it is on all ranks
  for (const DeviceRoom& room : state.state) made->keep(room.memory);
  made->seal();
  return state.newest = made;
}

/// The gradient's address, or that of zeros where this rank has none.
uint64_t DeviceShards::gradient_of(const Placement& at, size_t b, BucketOnDevice& made) {
  const Home& home = homes_[static_cast<size_t>(at.parameter)];
  if (!home.brought) {
    const uint64_t none = zeros(at.count * size_of(update_.buckets()[b].dtype));
    made.keep(zeros_.memory);  // there may be longer ones soon
    return none;
  }
  made.follow(home.stream);
  made.keep(home.owner);
  return home.address;
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
  const DevicePages& through = value_pages(b);
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

std::shared_ptr<BucketOnDevice> DeviceShards::norm_there(size_t b) {
  const Shard& shard = update_.shard(b);
  BucketState& state = buckets_[b];
  if (state.terms.address == 0)
    state.terms = queue_->allocate(std::max<size_t>(state.most_terms, 1) * sizeof(double));
  auto made = make_on_device(b);
  state.new_terms = 0;
  for (size_t k = 0; k < shard.updates.size(); ++k) {
    if (shard.updates[k].skipped) continue;
    const Placement& at = shard.bucket().placements[k];
    made->look_at(shard.bucket(), at, gradient_of(at, b, *made));
    state.new_terms += terms_of(b, at);
  }
  if (made->updates_none()) return nullptr;  // so it is on all ranks
  made->take_norm(state.terms.address, update_.task() == ShardedUpdate::Task::norm_infinite);
  made->keep(state.terms.memory);
  made->seal();
  return state.norm = made;
}

void DeviceShards::finish_norm(size_t b, PartNorm& norm) {
  BucketState& state = buckets_[b];
  const auto made = std::exchange(state.norm, nullptr);
  if (!made || !made->launched()) return;  // the host has made it
  made->hand_over(std::nullopt);
  if (state.new_terms == 0) return;
  or_fail_group(update_.group(), [&] {
    const DevicePages& through = value_pages(b);
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

// ---- after an update ----

void DeviceShards::take_back(std::span<const std::pair<size_t, uint64_t>> values, uint64_t stream) {
  or_fail_group(update_.group(), [&] {
    bool copied = false;
    for (const auto& [i, address] : values) {
      const BucketPlace at = update_.places()[i];
      const Parameter& p = update_.parameters()[i];
      if (buckets_[at.bucket].stays) continue;
      queue_->copy_to_device(address, value_pages(at.bucket), p.count * size_of(p.dtype),
                             at.offset);
      copied = true;
    }
    if (copied) note_returned(stream);
  });
  for (const BucketState& state : buckets_)
    if (state.newest) state.newest->hand_over(stream);
  for (Home& home : homes_) {  // what is under way keeps its own
    home.owner = nullptr;
    home.copied = false;
  }
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
