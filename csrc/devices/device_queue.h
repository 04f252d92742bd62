// Copies between one device and the host's memory, in order each way; and what waits for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "base/fd.h"
#include "devices/library.h"

namespace farandole {

/// Pages of the host that a device reads and writes.
using DevicePages = std::shared_ptr<CudaPages>;
struct DeviceRoom {
  std::shared_ptr<CudaMemory> memory;  // null: none
  uint64_t address = 0;
};

/// Limits how often a device is asked whether it is lost, while its results do not come.
class LossWatch {
 public:
  bool due();

 private:
  TimePoint next_{};
};

/// Any thread. Functions throw Error(device) and the like.
class DeviceQueue {
 public:
  /// `doorbell`: an event descriptor that is rung when arrivals come to a mark.
  DeviceQueue(int device, int doorbell);

  int device() const { return device_; }
  /// The stream of copies to the host, for DLPack: an array's owner lets it wait for the array.
  uint64_t stream() const { return library_.stream_to_host(queue_.get()); }

  /// Registers whole pages, which stay mapped until they are released. That comes before the end
  /// of the queue. Other queues may have the same pages.
  DevicePages register_pages(std::byte* pages, size_t bytes);

  /// Memory of the device, zeros at first; released when nothing uses it any more.
  DeviceRoom allocate(size_t bytes);

  /// `offset`: bytes from the begin of the pages.
  void copy_to_host(const DevicePages& to, uint64_t from, size_t bytes, size_t offset = 0);
  void copy_to_device(uint64_t to, const DevicePages& from, size_t bytes, size_t offset = 0);
  /// A number that is reached once all that is in this way's stream now is done.
  uint32_t mark(CudaWay way);
  /// Asks the driver nothing.
  bool reached(CudaWay way, uint32_t number) const {
    return library_.reached(queue_.get(), way, number) != 0;
  }
  /// Throws where the device is lost to this process, and nothing will be reached any more.
  void look_for_loss() { ask_cuda(library_.look_for_loss, queue_.get()); }

  /// Whether work put into `stream` becomes part of a graph.
  bool is_captured(uint64_t stream) const {
    int32_t captured = 0;
    ask_cuda(library_.is_captured, queue_.get(), stream, &captured);
    return captured != 0;
  }
  /// Copies to the host wait for the work that is in `stream` now.
  void follow(uint64_t stream) { ask_cuda(library_.follow, queue_.get(), stream); }
  /// Later work in `stream` waits for the copies to the device up to now.
  void precede(uint64_t stream) { ask_cuda(library_.precede, queue_.get(), stream); }
  /// The host waits for all copies of this way.
  void synchronize(CudaWay way) { ask_cuda(library_.synchronize, queue_.get(), way); }

 private:
  const CudaTable& library_;
  int device_;
  Fd doorbell_;  // a duplicate: it may ring after the engine has closed its own
  std::unique_ptr<CudaQueue, void (*)(CudaQueue*)> queue_;
};

}  // namespace farandole
