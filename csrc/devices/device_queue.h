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

/// Whether to ask a device whether it is lost, for whoever hears nothing of it: now and then.
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
  CudaQueue* handle() const { return queue_.get(); }
  /// Of arrivals, as DLPack has it: for an array's owner, who lets it wait for the array.
  uint64_t stream() const { return library_.stream_to_host(queue_.get()); }

  /// Whole pages, which stay mapped for as long; released before the queue ends. Other queues may
  /// have the same ones.
  DevicePages register_pages(std::byte* pages, size_t bytes);

  /// Memory of the device, zeros at first; released when nothing uses it any more.
  DeviceRoom allocate(size_t bytes);

  /// `offset`: bytes from the begin of the pages.
  void copy_to_host(const DevicePages& to, uint64_t from, size_t bytes, size_t offset = 0);
  void copy_to_device(uint64_t to, const DevicePages& from, size_t bytes, size_t offset = 0);
  /// A number for all that was asked for until now.
  uint32_t mark(CudaWay way);
  /// Whether all of that is done. Costs nothing.
  bool reached(CudaWay way, uint32_t number) const {
    return library_.reached(queue_.get(), way, number) != 0;
  }
  /// Throws where the device is lost to this process, and nothing will be reached any more.
  void look_for_loss() { ask_cuda(library_.look_for_loss, queue_.get()); }

  /// Whether what is put into a stream of the array's owner becomes part of a graph.
  bool is_captured(uint64_t stream) const {
    int32_t captured = 0;
    ask_cuda(library_.is_captured, queue_.get(), stream, &captured);
    return captured != 0;
  }
  /// Arrivals wait for what now is in a stream of the array's owner.
  void follow(uint64_t stream) { ask_cuda(library_.follow, queue_.get(), stream); }
  /// What its owner puts into a stream from now on waits for the copies to the device.
  void precede(uint64_t stream) { ask_cuda(library_.precede, queue_.get(), stream); }
  /// The host waits for all copies of this way.
  void synchronize(CudaWay way) { ask_cuda(library_.synchronize, queue_.get(), way); }

 private:
  const CudaTable& library_;
  int device_;
  Fd doorbell_;  // our own name for it: it may ring after the engine has closed its
  std::unique_ptr<CudaQueue, void (*)(CudaQueue*)> queue_;
};

}  // namespace farandole
