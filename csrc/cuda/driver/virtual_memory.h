// The driver's virtual memory management: physical memory, and addresses at which it is mapped.
#pragma once

#include <memory>

#include "base/fd.h"
#include "cuda/driver/context.h"

namespace farandole::cuda {

/// Sizes are multiples of it.
size_t granularity_of(const DeviceContext& context);

/// Physical memory of a device: our own, or from another process's descriptor.
class PhysicalMemory {
 public:
  static PhysicalMemory make(std::shared_ptr<const DeviceContext> context, size_t bytes);
  static PhysicalMemory from(std::shared_ptr<const DeviceContext> context, const Fd& descriptor);
  PhysicalMemory(PhysicalMemory&& other) noexcept = default;
  ~PhysicalMemory();

  PhysicalHandle handle() const { return handle_; }
  /// A new one each time, for another process.
  Fd descriptor() const;

 private:
  PhysicalMemory(std::shared_ptr<const DeviceContext> context, PhysicalHandle handle)
      : context_(std::move(context)), handle_(handle) {}
  std::shared_ptr<const DeviceContext> context_;  // null: moved from
  PhysicalHandle handle_;
};

/// Where it is mapped, readable and writable for the context's device.
class VirtualMapping {
 public:
  VirtualMapping(std::shared_ptr<const DeviceContext> context, const PhysicalMemory& physical,
                 size_t bytes);
  ~VirtualMapping();
  VirtualMapping(const VirtualMapping&) = delete;
  VirtualMapping& operator=(const VirtualMapping&) = delete;

  DevicePointer address() const { return addresses_.address; }

 private:
  /// Addresses at which nothing lies yet.
  struct Reservation {
    Reservation(const DeviceContext& context, size_t bytes);
    ~Reservation();
    const DeviceContext& context;
    size_t bytes;
    DevicePointer address = 0;
  };

  std::shared_ptr<const DeviceContext> context_;
  Reservation addresses_;
};

}  // namespace farandole::cuda
