// Memory of a device that other processes may map, and memory of the host that a device may use.
// Each object frees what it is at its end; nothing may use it any more by then.
#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/fd.h"
#include "cuda/driver/context.h"

namespace farandole::cuda {

/// As kernels take it.
inline void* at_address(DevicePointer address) {
  return std::bit_cast<void*>(static_cast<uintptr_t>(address));
}
inline DevicePointer address_of(const void* at) {
  return static_cast<DevicePointer>(std::bit_cast<uintptr_t>(at));
}

/// Identifies an allocation among those of all processes: a process's random number and a count.
struct AllocationId {
  uint64_t process = 0, number = 0;
  auto operator<=>(const AllocationId&) const = default;
};

/// The number in the ids of this process's allocations.
uint64_t own_process();

/// How another process gets at memory.
enum class ExportKind : uint8_t {
  descriptor,  // virtual memory management: the memory lives until all have let go of it
  ipc,         // the older handles, where that is missing: the owner must be the last to let go
};

/// The data with which a process maps an allocation of another one. The descriptor travels beside
/// the rest, over a UNIX socket.
struct MemoryExport {
  AllocationId id;
  DeviceUuid device{};
  uint64_t bytes = 0;
  ExportKind kind = ExportKind::descriptor;
  IpcMemoryHandle handle{};  // ipc
  Fd descriptor;             // descriptor
};

/// An address of a device: what memory objects have in common.
class DeviceAddress {
 public:
  virtual ~DeviceAddress() = default;
  DeviceAddress(const DeviceAddress&) = delete;
  DeviceAddress& operator=(const DeviceAddress&) = delete;

  DevicePointer address() const { return address_; }
  size_t bytes() const { return bytes_; }
  const DeviceContext& context() const { return *context_; }

 protected:
  DeviceAddress(std::shared_ptr<const DeviceContext> context, size_t bytes)
      : context_(std::move(context)), bytes_(bytes) {}
  std::shared_ptr<const DeviceContext> context_;
  DevicePointer address_ = 0;
  size_t bytes_;  // as allocated: perhaps more than was asked for
};

/// Memory of our own, of one device.
class DeviceMemory : public DeviceAddress {
 public:
  const AllocationId& id() const { return id_; }
  /// Throws Error(internal) for memory that was not asked for to be shared.
  virtual MemoryExport share() const;

 protected:
  using DeviceAddress::DeviceAddress;
  AllocationId id_ = next_id();

 private:
  static AllocationId next_id();
};

enum class Sharing : uint8_t { none, processes };

/// Uninitialized. Throws Error(resource) where the device has too little left.
std::unique_ptr<DeviceMemory> allocate_device(std::shared_ptr<const DeviceContext> context,
                                              size_t bytes, Sharing sharing);

/// Memory of the host that the device reads and writes, at `address()` there and `host()` here.
class PinnedMemory : public DeviceAddress {
 public:
  /// Zeros.
  PinnedMemory(std::shared_ptr<const DeviceContext> context, size_t bytes);
  ~PinnedMemory() override;
  std::byte* host() const { return host_; }

 private:
  std::byte* host_ = nullptr;
};

/// The same of pages that are there already: a stretch of a segment. Several devices may have the
/// same pages, which the driver registers once, for all contexts.
class RegisteredPages : public DeviceAddress {
 public:
  /// Whole pages, which stay mapped for as long. Throws Error(device) where the device cannot.
  RegisteredPages(std::shared_ptr<const DeviceContext> context, std::span<std::byte> pages);
  ~RegisteredPages() override;

 private:
  std::byte* host_;
};

}  // namespace farandole::cuda
