#include "devices/staging.h"

#include <algorithm>
#include <bit>

#include "engine/fork.h"

namespace farandole {
namespace {

constexpr size_t kSmallest = 64 << 10;
/// Bytes of idle blocks that are kept though they are too small for the present request.
constexpr size_t kMostIdle = 256 << 20;

/// Rounds up, so that similar sizes share blocks. At most an eighth is wasted.
size_t room_for(size_t bytes) {
  const size_t unit = std::max(kSmallest, std::bit_ceil(bytes) / 8);
  return (bytes + unit - 1) / unit * unit;
}

struct Known {
  std::mutex mutex;  // guards all
  std::vector<std::pair<std::weak_ptr<Engine>, std::weak_ptr<Staging>>> all;
};

Known& known() {
  static auto* const one = new Known;
  return *one;
}

}  // namespace

bool CopiesUntil::reached(const DeviceQueue& queue) const {
  return !lost && (!has_to_host || queue.reached(kToHost, to_host)) &&
         (!has_to_device || queue.reached(kToDevice, to_device));
}

std::shared_ptr<Staging> Staging::of(Engine& engine) {
  Known& one = known();
  const std::lock_guard lock(one.mutex);
  std::erase_if(one.all, [](const auto& entry) { return entry.first.expired(); });
  for (const auto& [owner, staging] : one.all)
    if (owner.lock().get() == &engine) return staging.lock();
  auto made = std::make_shared<Staging>(engine);
  engine.add_task(made);  // which keeps it
  one.all.emplace_back(engine.weak_from_this(), made);
  return made;
}

Staging::Staging(const Engine& engine)
    : arena_(engine.arena()),
      doorbell_(engine.host().peers[static_cast<size_t>(engine.host().rank)].doorbell.get()) {}

Staging::~Staging() {
  if (in_child()) return;
  for (const auto& [device, queue] : queues_) {
    try {
      for (const CudaWay way : {kToHost, kToDevice}) queue->synchronize(way);  // they use blocks
    } catch (const Error&) {  // NOLINT: of a device that is lost none is under way
    }
  }
}

std::shared_ptr<DeviceQueue> Staging::queue(int device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<DeviceQueue>& queue = queues_[device];
  if (!queue) queue = std::make_shared<DeviceQueue>(device, doorbell_);
  return queue;
}

std::shared_ptr<StagingBlock> Staging::borrow(const std::shared_ptr<DeviceQueue>& queue,
                                              size_t bytes) {
  Letting letting;  // ends after the lock
  const std::lock_guard lock(mutex_);
  take_back(letting);
  auto best = idle_.end();
  for (auto it = idle_.begin(); it != idle_.end(); ++it)
    if ((*it)->queue == queue && (*it)->bytes >= bytes &&
        (best == idle_.end() || (*it)->bytes < (*best)->bytes))
      best = it;
  if (best == idle_.end()) {
    drop_too_small(*queue, bytes);
    return make(queue, room_for(bytes));
  }
  std::shared_ptr<StagingBlock> block = std::move(*best);
  idle_.erase(best);
  return block;
}

std::shared_ptr<StagingBlock> Staging::make(const std::shared_ptr<DeviceQueue>& queue,
                                            size_t bytes) {
  auto block = std::make_shared<StagingBlock>();
  block->queue = queue;
  block->bytes = bytes;
  block->memory = {allocate(bytes), [arena = arena_](std::byte* p) { arena->release(p); }};
  block->pages = queue->register_pages(block->memory.get(), bytes);
  return block;
}

/// Releases all idle blocks where the arena has too little left beside them.
std::byte* Staging::allocate(size_t bytes) {
  try {
    return arena_->allocate(bytes);
  } catch (const Error&) {
    if (idle_.empty()) throw;
  }
  idle_.clear();
  return arena_->allocate(bytes);
}

/// Drops the smallest first, as long as more than kMostIdle lies idle.
void Staging::drop_too_small(const DeviceQueue& queue, size_t bytes) {
  size_t idle = 0;
  for (const auto& block : idle_) idle += block->bytes;
  std::ranges::sort(idle_, {}, [](const auto& block) { return block->bytes; });
  std::erase_if(idle_, [&](const auto& block) {
    if (idle <= kMostIdle || block->queue.get() != &queue || block->bytes >= bytes) return false;
    idle -= block->bytes;
    return true;
  });
}

void Staging::give_back(std::shared_ptr<StagingBlock> block, const CopiesUntil& until) noexcept {
  if (in_child()) return;
  const std::lock_guard lock(mutex_);
  returned_.push_back({block->queue, until, std::move(block), nullptr});
}

void Staging::keep(std::shared_ptr<const void> array, const std::shared_ptr<DeviceQueue>& queue,
                   const CopiesUntil& until) noexcept {
  if (in_child() || until.reached(*queue)) return;
  const std::lock_guard lock(mutex_);
  returned_.push_back({queue, until, nullptr, std::move(array)});
}

void Staging::take_back(Letting& letting) {
  std::erase_if(returned_, [&](Returned& returned) {
    if (!returned.until.reached(*returned.queue)) return false;
    if (returned.block) idle_.push_back(std::move(returned.block));
    if (returned.array) letting.push_back(std::move(returned.array));
    return true;
  });
}

void Staging::look_around(TimePoint) {
  Letting letting;
  const std::lock_guard lock(mutex_);
  take_back(letting);
}

}  // namespace farandole
