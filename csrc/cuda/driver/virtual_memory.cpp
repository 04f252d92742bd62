#include "cuda/driver/virtual_memory.h"

#include <fcntl.h>
#include <bit>

#include <cstdint>

namespace farandole::cuda {
namespace {

MemoryLocation place_of(const DeviceContext& context) {
  return {kOnDevice, context.device().ordinal};
}

PhysicalProperties properties_of(const DeviceContext& context) {
  PhysicalProperties properties{};
  properties.type = kPinnedAllocation;
  properties.handle_types = kByDescriptor;
  properties.location = place_of(context);
  return properties;
}

}  // namespace

size_t granularity_of(const DeviceContext& context) {
  const PhysicalProperties properties = properties_of(context);
  size_t bytes = 0;
  const DeviceContext::Use driver(context);
  context.check(driver->MemGetAllocationGranularity(&bytes, &properties, kMinimumGranularity),
                "cuMemGetAllocationGranularity", "ask for the size of pages");
  return bytes;
}

PhysicalMemory PhysicalMemory::make(std::shared_ptr<const DeviceContext> context, size_t bytes) {
  const PhysicalProperties properties = properties_of(*context);
  PhysicalHandle handle = 0;
  const DeviceContext::Use driver(*context);
  const DriverCode code = driver->MemCreate(&handle, bytes, &properties, 0);
  const std::string left = code == kOutOfMemory ? context->memory_left() : "";
  const auto tried = [&] {
    return "allocate " + std::to_string(bytes) + " bytes for several processes";
  };
  context->check(code, "cuMemCreate", tried, left.c_str());
  return {std::move(context), handle};
}

PhysicalMemory PhysicalMemory::from(std::shared_ptr<const DeviceContext> context,
                                    const Fd& descriptor) {
  PhysicalHandle handle = 0;
  const DeviceContext::Use driver(*context);
  // The driver takes the descriptor's number in a pointer, and leaves the descriptor to us.
  auto* const number = std::bit_cast<void*>(static_cast<intptr_t>(descriptor.get()));
  context->check(driver->MemImportFromShareableHandle(&handle, number, kByDescriptor),
                 "cuMemImportFromShareableHandle", "use another process's memory");
  return {std::move(context), handle};
}

PhysicalMemory::~PhysicalMemory() {
  if (context_)
    context_->at_end("cuMemRelease",
                     [&](const auto& driver) { return driver.MemRelease(handle_); });
}

Fd PhysicalMemory::descriptor() const {
  int number = -1;
  const DeviceContext::Use driver(*context_);
  context_->check(driver->MemExportToShareableHandle(&number, handle_, kByDescriptor, 0),
                  "cuMemExportToShareableHandle", "let other processes use memory");
  Fd descriptor(number);
  checked(::fcntl(number, F_SETFD, FD_CLOEXEC), "fcntl");
  return descriptor;
}

VirtualMapping::Reservation::Reservation(const DeviceContext& of, size_t size)
    : context(of), bytes(size) {
  const DeviceContext::Use driver(context);
  context.check(driver->MemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve",
                [&] { return "reserve " + std::to_string(bytes) + " bytes of addresses"; });
}

VirtualMapping::Reservation::~Reservation() {
  context.at_end("cuMemAddressFree",
                 [&](const auto& driver) { return driver.MemAddressFree(address, bytes); });
}

VirtualMapping::VirtualMapping(std::shared_ptr<const DeviceContext> context,
                               const PhysicalMemory& physical, size_t bytes)
    : context_(std::move(context)), addresses_(*context_, bytes) {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->MemMap(address(), bytes, 0, physical.handle(), 0), "cuMemMap",
                  [&] { return "map " + std::to_string(bytes) + " bytes"; });
  const MemoryAccess access{place_of(*context_), kReadAndWrite};
  const DriverCode code = driver->MemSetAccess(address(), bytes, &access, 1);
  if (code != kSuccess) driver->MemUnmap(address(), bytes);
  context_->check(code, "cuMemSetAccess", "get access to mapped memory");
}

VirtualMapping::~VirtualMapping() {
  context_->at_end("cuMemUnmap", [&](const auto& driver) {
    return driver.MemUnmap(address(), addresses_.bytes);
  });
}

}  // namespace farandole::cuda
