// Memory between devices and the host's collectives: stretches of the arena, which all ranks map,
// registered with a device. A program's later steps use them again, so a steady step makes none.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "devices/device_queue.h"
#include "engine/engine.h"

namespace farandole {

/// One stretch, of one device.
struct StagingBlock {
  std::shared_ptr<DeviceQueue> queue;
  std::shared_ptr<std::byte> memory;
  size_t bytes = 0;
  DevicePages pages;  // last: released before the memory goes
};

/// How long a block or an array is in use by copies that nobody waits for.
struct CopiesUntil {
  uint32_t to_host = 0, to_device = 0;  // marks
  bool has_to_host = false, has_to_device = false;
  bool lost = false;  // there is no mark after the last copy: to the queue's end

  /// Costs nothing.
  bool reached(const DeviceQueue& queue) const;
};

/// Belongs to one engine. Any thread, but for a Task's functions.
class Staging : public Task {
 public:
  /// Made when it is first asked for.
  static std::shared_ptr<Staging> of(Engine& engine);
  explicit Staging(const Engine& engine);
  ~Staging() override;
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// The device's; throws Error(device) where it cannot be used.
  std::shared_ptr<DeviceQueue> queue(int device);
  /// At least `bytes`. Throws Error(resource) where the arena has too little left.
  std::shared_ptr<StagingBlock> borrow(const std::shared_ptr<DeviceQueue>& queue, size_t bytes);
  /// Lends it again once the copies are done.
  void give_back(std::shared_ptr<StagingBlock> block, const CopiesUntil& until) noexcept;
  /// Holds an array until then.
  void keep(std::shared_ptr<const void> array, const std::shared_ptr<DeviceQueue>& queue,
            const CopiesUntil& until) noexcept;

  bool poll(TimePoint) override { return false; }
  void look_around(TimePoint now) override;

 private:
  struct Returned {
    std::shared_ptr<DeviceQueue> queue;
    CopiesUntil until;
    std::shared_ptr<StagingBlock> block;  // one of these two is null
    std::shared_ptr<const void> array;
  };
  using Letting = std::vector<std::shared_ptr<const void>>;

  std::shared_ptr<StagingBlock> make(const std::shared_ptr<DeviceQueue>& queue, size_t bytes);
  std::byte* allocate(size_t bytes);
  void take_back(Letting& letting);
  void drop_too_small(const DeviceQueue& queue, size_t bytes);

  std::shared_ptr<Arena> arena_;
  int doorbell_;
  std::mutex mutex_;  // guards the rest
  std::map<int, std::shared_ptr<DeviceQueue>> queues_;
  std::vector<Returned> returned_;
  std::vector<std::shared_ptr<StagingBlock>> idle_;
};

}  // namespace farandole
