// Copies between one device and the host's memory, in order each way; and what waits for them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "base/fd.h"
#include "cuda/driver/copy_streams.h"
#include "cuda/driver/memory.h"

namespace farandole {

/// Pages of the host that a device reads and writes.
using DevicePages = std::shared_ptr<cuda::RegisteredPages>;
struct DeviceRoom {
  std::shared_ptr<cuda::DeviceMemory> memory;  // null: none
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

  int device() const { return streams_.context()->device().ordinal; }
  /// The stream of copies to the host, for DLPack: an array's owner lets it wait for the array.
  uint64_t stream() const { return std::bit_cast<uint64_t>(streams_.stream(kToHost).handle()); }

  /// Registers whole pages, which stay mapped until they are released. Other queues may have the
  /// same pages.
  DevicePages register_pages(std::byte* pages, size_t bytes);

  /// Memory of the device, zeros at first; released when nothing uses it any more.
  DeviceRoom allocate(size_t bytes);

  /// `offset`: bytes from the begin of the pages.
  void copy_to_host(const DevicePages& to, uint64_t from, size_t bytes, size_t offset = 0) {
    streams_.stream(kToHost).copy(to->address() + offset, from, bytes);
  }
  void copy_to_device(uint64_t to, const DevicePages& from, size_t bytes, size_t offset = 0) {
    streams_.stream(kToDevice).copy(to, from->address() + offset, bytes);
  }
  /// A number that is reached once all that is in this way's stream now is done.
  uint32_t mark(CudaWay way) { return streams_.mark(way); }
  /// Asks the driver nothing.
  bool reached(CudaWay way, uint32_t number) const { return streams_.reached(way, number); }
  /// Throws where the device is lost to this process, and nothing will be reached any more.
  void look_for_loss() { streams_.look_for_loss(); }

  /// Whether work put into `stream` becomes part of a graph.
  bool is_captured(uint64_t stream) const;
  /// Copies to the host wait for the work that is in `stream` now.
  void follow(uint64_t stream) { streams_.follow(std::bit_cast<cuda::StreamHandle>(stream)); }
  /// Later work in `stream` waits for the copies to the device up to now.
  void precede(uint64_t stream) { streams_.precede(std::bit_cast<cuda::StreamHandle>(stream)); }
  /// The host waits for all copies of this way.
  void synchronize(CudaWay way) { streams_.stream(way).synchronize(); }

 private:
  Fd doorbell_;  // a duplicate: it may ring after the engine has closed its own
  cuda::CopyStreams streams_;
};

}  // namespace farandole
