// Memory of other processes, mapped into this one: once for each allocation.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "cuda/driver/memory.h"

namespace farandole::cuda {

/// Closed with its last owner. Its memory's owner frees it only afterwards.
class PeerMemory : public DeviceAddress {
 protected:
  using DeviceAddress::DeviceAddress;
};

class PeerMappings {
 public:
  explicit PeerMappings(std::shared_ptr<const DeviceContext> context)
      : context_(std::move(context)) {}

  /// By any thread. Throws Error(device) where the memory cannot be mapped or reached, and
  /// Error(internal) for memory of this process, which has an address here.
  std::shared_ptr<PeerMemory> map(const MemoryExport& shared);

 private:
  std::shared_ptr<PeerMemory> open(const MemoryExport& shared) const;

  std::shared_ptr<const DeviceContext> context_;
  std::mutex mutex_;  // guards open_
  std::map<AllocationId, std::weak_ptr<PeerMemory>> open_;
};

}  // namespace farandole::cuda
