#include "devices/device_shards.h"

#include <unistd.h>

#include <thread>
#include <utility>

#include "devices/staged_arrays.h"
#include "engine/fork.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

constexpr auto kBetweenArrivalLooks = std::chrono::microseconds(50);
constexpr auto kBetweenInterruptions = std::chrono::milliseconds(50);

}  // namespace

DeviceShards::DeviceShards(ShardedUpdate& update, int device, std::function<void()> interrupted)
    : update_(update),
      interrupted_(std::move(interrupted)),
      staging_(Staging::of(*update.group().engine())),
      queue_(or_fail_group(update.group(), [&] { return staging_->queue(device); })),
      places_(update.places().size()),
      gradients_(update.buckets().size()),
      values_(update.buckets().size()),
      owners_(update.places().size()) {
  for (const Bucket& bucket : update.buckets())
    for (const Placement& p : bucket.placements) {
      const auto i = static_cast<size_t>(p.parameter);
      const BucketPlace& place = update.places()[i];
      places_[i] = {place.bucket, place.offset, p.count, size_of(bucket.dtype)};
    }
}

DeviceShards::~DeviceShards() {
  if (in_child()) return;
  try {
    for (const CudaWay way : {kToHost, kToDevice}) queue_->synchronize(way);
  } catch (const Error&) {  // NOLINT: of a device that is lost none is under way
  }
}

const DevicePages& DeviceShards::pages(std::vector<DevicePages>& all, Memory memory,
                                       size_t bucket) {
  DevicePages& known = all[bucket];
  if (!known) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t bytes = (update_.buckets()[bucket].bytes() + page - 1) / page * page;
    known = queue_->register_pages((update_.*memory)(bucket).get(), bytes);
  }
  return known;
}

void DeviceShards::bring(size_t parameter, uint64_t address, uint64_t stream,
                         std::shared_ptr<const void> owner) {
  or_fail_group(update_.group(), [&] {
    const Place& place = places_[parameter];
    const DevicePages& to = pages(gradients_, &ShardedUpdate::gradients, place.bucket);
    queue_->follow(stream);
    queue_->copy_to_host(to, address, place.count * place.element, place.offset);
    if (owners_[parameter]) let_go(std::exchange(owners_[parameter], nullptr));
    owners_[parameter] = std::move(owner);
  });
  update_.note_taken();
}

/// Of a gradient that came twice before it was needed.
void DeviceShards::let_go(std::shared_ptr<const void> owner) {
  CopiesUntil until;
  until.has_to_host = true;
  until.to_host = queue_->mark(kToHost);
  staging_->keep(std::move(owner), queue_, until);
}

void DeviceShards::bring_value(size_t parameter, uint64_t address, uint64_t stream) {
  or_fail_group(update_.group(), [&] {
    const Place& place = places_[parameter];
    const Group& group = update_.group();
    const Slice mine = part_of(update_.buckets()[place.bucket], group.size(), group.rank());
    const size_t begin = place.offset / place.element;
    const Slice inside = clip(mine, {mine.space, begin, place.count});
    if (inside.count == 0) return;
    const DevicePages& to = pages(values_, &ShardedUpdate::values, place.bucket);
    queue_->follow(stream);
    queue_->copy_to_host(to, address + (inside.offset - begin) * place.element,
                         inside.count * place.element, inside.offset * place.element);
  });
}

void DeviceShards::arrive() {
  Group& group = update_.group();
  CopiesUntil until{.has_to_host = true, .has_to_device = returning_};
  or_fail_group(group, [&] {
    until.to_host = queue_->mark(kToHost);
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
  returning_ = false;
  std::fill(owners_.begin(), owners_.end(), nullptr);
}

void DeviceShards::take_back(size_t parameter, uint64_t address) {
  or_fail_group(update_.group(), [&] {
    const Place& place = places_[parameter];
    const DevicePages& from = pages(values_, &ShardedUpdate::values, place.bucket);
    queue_->copy_to_device(address, from, place.count * place.element, place.offset);
    returning_ = true;
  });
}

void DeviceShards::precede(uint64_t stream) {
  or_fail_group(update_.group(), [&] { queue_->precede(stream); });
}

}  // namespace farandole
