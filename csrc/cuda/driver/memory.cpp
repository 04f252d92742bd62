#include "cuda/driver/memory.h"

#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/driver/virtual_memory.h"

namespace farandole::cuda {
namespace {

/// Older handles export the driver's whole block, of this size, in which other allocations lie.
constexpr size_t kIpcBlock = 2 << 20;

constexpr size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

uint64_t random_number() {
  uint64_t number = 0;
  checked(::getrandom(&number, sizeof number, 0), "getrandom");
  return number;
}

std::string allocating(size_t bytes) { return "allocate " + std::to_string(bytes) + " bytes"; }

/// From the driver's own allocator.
class PlainMemory : public DeviceMemory {
 public:
  PlainMemory(std::shared_ptr<const DeviceContext> context, size_t bytes, Sharing sharing)
      : DeviceMemory(std::move(context), bytes), sharing_(sharing) {
    const DeviceContext::Use driver(*context_);
    const DriverCode code = driver->MemAlloc(&address_, bytes_);
    const std::string left = code == kOutOfMemory ? context_->memory_left() : "";
    context_->check(code, "cuMemAlloc", [&] { return allocating(bytes_); }, left.c_str());
  }
  ~PlainMemory() override {
    context_->at_end("cuMemFree", [&](const auto& driver) { return driver.MemFree(address_); });
  }

  MemoryExport share() const override {
    if (sharing_ == Sharing::none) return DeviceMemory::share();
    MemoryExport shared{id(), context().device().uuid, bytes(), ExportKind::ipc, {}, Fd()};
    const DeviceContext::Use driver(context());
    context().check(driver->IpcGetMemHandle(&shared.handle, address()), "cuIpcGetMemHandle",
                    "let other processes use memory");
    return shared;
  }

 private:
  Sharing sharing_;
};

/// Physical memory, mapped here and by each process that gets its descriptor.
class VirtualMemory : public DeviceMemory {
 public:
  VirtualMemory(const std::shared_ptr<const DeviceContext>& context, size_t bytes)
      : DeviceMemory(context, rounded_up(bytes, granularity_of(*context))),
        physical_(PhysicalMemory::make(context_, bytes_)),
        mapping_(context_, physical_, bytes_) {
    address_ = mapping_.address();
  }

  MemoryExport share() const override {
    return {id(), context().device().uuid, bytes(), ExportKind::descriptor,
            {},   physical_.descriptor()};
  }

 private:
  PhysicalMemory physical_;
  VirtualMapping mapping_;
};

/// Pages that are registered, by where they begin.
struct Registrations {
  struct Pages {
    std::shared_ptr<const DeviceContext> context;  // the first user's
    size_t bytes = 0, users = 0;
  };
  std::mutex mutex;  // guards all
  std::map<std::byte*, Pages> all;
};

Registrations& registrations() {
  static auto* const one = new Registrations;  // frameworks' threads may outlive everything else
  return *one;
}

void register_once(const std::shared_ptr<const DeviceContext>& context,
                   std::span<std::byte> pages) {
  Registrations& known = registrations();
  const std::lock_guard lock(known.mutex);
  const auto found = known.all.find(pages.data());
  if (found != known.all.end() && found->second.bytes == pages.size()) {
    ++found->second.users;
    return;
  }
  const DeviceContext::Use driver(*context);
  context->check(
      driver->MemHostRegister(pages.data(), pages.size(), kHostPortable | kHostMapped),
      "cuMemHostRegister",
      [&] { return "register " + std::to_string(pages.size()) + " bytes of a segment for use"; });
  known.all[pages.data()] = {context, pages.size(), 1};
}

void let_go_of_pages(const DeviceContext& context, std::byte* begin) noexcept {
  if (context.driver().functions_at_end() == nullptr) return;  // in a child the mutex may be held
  Registrations::Pages last;                                   // ends after the lock
  Registrations& known = registrations();
  const std::lock_guard lock(known.mutex);
  const auto found = known.all.find(begin);
  if (--found->second.users > 0) return;
  last = std::move(found->second);
  known.all.erase(found);
  last.context->at_end("cuMemHostUnregister",
                       [&](const auto& driver) { return driver.MemHostUnregister(begin); });
}

}  // namespace

uint64_t own_process() {
  static const uint64_t number = random_number();
  return number;
}

AllocationId DeviceMemory::next_id() {
  static std::atomic<uint64_t> count{0};
  return {own_process(), ++count};
}

MemoryExport DeviceMemory::share() const {
  throw Error(ErrorCode::internal, "this memory was not asked for to be shared");
}

std::unique_ptr<DeviceMemory> allocate_device(std::shared_ptr<const DeviceContext> context,
                                              size_t bytes, Sharing sharing) {
  if (bytes == 0) throw Error(ErrorCode::internal, "an allocation of 0 bytes on a device");
  if (sharing == Sharing::none)
    return std::make_unique<PlainMemory>(std::move(context), bytes, sharing);
  if (!context->device().descriptors)
    return std::make_unique<PlainMemory>(std::move(context), rounded_up(bytes, kIpcBlock), sharing);
  return std::make_unique<VirtualMemory>(std::move(context), bytes);
}

PinnedMemory::PinnedMemory(std::shared_ptr<const DeviceContext> context, size_t bytes)
    : DeviceAddress(std::move(context), bytes) {
  const DeviceContext::Use driver(*context_);
  void* host = nullptr;
  context_->check(driver->MemHostAlloc(&host, bytes_, kHostPortable | kHostMapped),
                  "cuMemHostAlloc",
                  [&] { return allocating(bytes_) + " of the host's memory for use"; });
  host_ = static_cast<std::byte*>(host);
  const DriverCode code = driver->MemHostGetDevicePointer(&address_, host_, 0);
  if (code != kSuccess) driver->MemFreeHost(host_);
  context_->check(code, "cuMemHostGetDevicePointer", "map the host's memory");
  std::memset(host_, 0, bytes_);
}

PinnedMemory::~PinnedMemory() {
  context_->at_end("cuMemFreeHost", [&](const auto& driver) { return driver.MemFreeHost(host_); });
}

RegisteredPages::RegisteredPages(std::shared_ptr<const DeviceContext> context,
                                 std::span<std::byte> pages)
    : DeviceAddress(std::move(context), pages.size()), host_(pages.data()) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  if (reinterpret_cast<uintptr_t>(host_) % page != 0 || bytes_ % page != 0 || bytes_ == 0)
    throw Error(ErrorCode::internal, "only whole pages can be registered");
  if (!context_->device().registers_host_memory)
    throw Error(ErrorCode::device,
                context_->device().label() + " cannot use memory that others have allocated", {},
                "let the ranks copy through memory of their own");
  register_once(context_, pages);
  try {
    const DeviceContext::Use driver(*context_);
    context_->check(driver->MemHostGetDevicePointer(&address_, host_, 0),
                    "cuMemHostGetDevicePointer", "map the host's memory");
  } catch (...) {
    let_go_of_pages(*context_, host_);
    throw;
  }
}

RegisteredPages::~RegisteredPages() { let_go_of_pages(*context_, host_); }

}  // namespace farandole::cuda
