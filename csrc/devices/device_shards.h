// A sharded update whose gradients and parameters lie on a device, updated in the buckets of the
// host:
//
//   bring()         a gradient, behind what its owner's stream does now, as backward makes it
//   bring_value()   before an update: this rank's part of a parameter, which it alone updates
//   arrive()        waits until all of that is there, and until what went back last has left
//   take_back()     after it: a whole parameter; what its owner's stream does next comes after it
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "devices/staging.h"
#include "fusion/sharded_update.h"

namespace farandole {

/// Used by one thread at a time, as the update is.
class DeviceShards {
 public:
  /// The update outlives it. `interrupted` is that of Group::wait_for. Throws Error(device), which
  /// all ranks get, where the device cannot be used.
  DeviceShards(ShardedUpdate& update, int device, std::function<void()> interrupted);
  ~DeviceShards();
  DeviceShards(const DeviceShards&) = delete;
  DeviceShards& operator=(const DeviceShards&) = delete;

  /// `address`: contiguous elements, alive as long as `owner`. `stream`: in which they are made.
  void bring(size_t parameter, uint64_t address, uint64_t stream,
             std::shared_ptr<const void> owner);
  void bring_value(size_t parameter, uint64_t address, uint64_t stream);
  /// Throws the group's verdict, and Error(stalled) after the group's timeout.
  void arrive();
  void take_back(size_t parameter, uint64_t address);
  /// What is put into `stream` from now on finds there what was taken back.
  void precede(uint64_t stream);

 private:
  struct Place {
    size_t bucket = 0, offset = 0, count = 0, element = 0;  // the offset in bytes
  };
  using Memory = const std::shared_ptr<std::byte>& (ShardedUpdate::*)(size_t bucket) const;
  const DevicePages& pages(std::vector<DevicePages>& all, Memory memory, size_t bucket);
  void let_go(std::shared_ptr<const void> owner);

  ShardedUpdate& update_;
  std::function<void()> interrupted_;
  std::shared_ptr<Staging> staging_;
  std::shared_ptr<DeviceQueue> queue_;
  std::vector<Place> places_;                        // by parameter
  std::vector<DevicePages> gradients_, values_;      // by bucket; null: not registered yet
  std::vector<std::shared_ptr<const void>> owners_;  // by parameter, until its gradient is here
  bool returning_ = false;
};

}  // namespace farandole
