// Memory of devices and pinned memory: addresses of the fake are addresses of the host. Memory that
// others may map is a memfd. Addresses are never given out twice, and what was freed faults.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "state.h"

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGranularity = 2 << 20;
constexpr char kMemfd[] = "fake-cuda-";  // and the number of its device on this machine

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

/// New addresses, of a memfd or of nothing (-1).
DevicePointer map_new(int descriptor, size_t bytes) {
  const int flags = descriptor >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const at =
      ::mmap(nullptr, whole_pages(bytes), descriptor >= 0 ? PROT_READ | PROT_WRITE : PROT_NONE,
             flags, descriptor, 0);
  return at == MAP_FAILED ? 0 : reinterpret_cast<DevicePointer>(at);
}

/// Nobody may go there any more, and nothing else comes to lie there.
void block(DevicePointer address, size_t bytes) {
  ::mmap(host(address), whole_pages(bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/// One that other processes may map, if they know its name; -1: the system has none.
int make_memfd(const char* name, size_t bytes) {
  const int descriptor = ::memfd_create(name, MFD_CLOEXEC);
  if (descriptor >= 0 && ::ftruncate(descriptor, static_cast<off_t>(whole_pages(bytes))) != 0) {
    ::close(descriptor);
    return -1;
  }
  return descriptor;
}

/// "": it is none.
std::string name_of_memfd(int descriptor) {
  constexpr std::string_view kBefore = "/memfd:";
  char target[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  if (::readlink(link.c_str(), target, sizeof target - 1) <= 0) return "";
  const std::string_view file = target;
  if (!file.starts_with(kBefore)) return "";
  return std::string(file.substr(kBefore.size(), file.find(' ') - kBefore.size()));
}

/// A descriptor that shares nothing with `of` but the memory: locks on it are its own.
int open_again(pid_t process, int of) {
  const std::string link = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(of);
  return ::open(link.c_str(), O_RDWR | O_CLOEXEC);
}

bool others_have_it_open(int descriptor) {
  const int again = open_again(::getpid(), descriptor);
  const bool locked = again >= 0 && ::flock(again, LOCK_EX | LOCK_NB) != 0;
  ::close(again);
  return locked;
}

/// Takes the region away, and everything that it alone holds.
void remove(State& all, std::map<DevicePointer, Region>::iterator at) {
  const auto& [base, region] = *at;
  if (region.kind != RegionKind::registered) {
    block(base, region.bytes);
    all.gone[base] = region.bytes;
  }
  if (region.descriptor >= 0) ::close(region.descriptor);
  all.regions.erase(at);
}

/// Frees a region of one kind that begins at an address.
int free_region(State& all, const char* call, RegionKind kind, DevicePointer address) {
  const auto found = all.regions.find(address);
  if (found == all.regions.end() || found->second.kind != kind) {
    all.blame(std::string(call) + " of what is not there" +
              (all.gone.contains(address) ? " any more" : ""));
    return kInvalidValue;
  }
  if (found->second.uses > 0) all.blame(std::string(call) + " while a stream uses the memory");
  remove(all, found);
  return kSuccess;
}

/// A memfd for memory of the context's device, or for the host's.
int make_memory(const State& all, const CUctx_st& context, size_t bytes) {
  const int number = all.visible[static_cast<size_t>(context.device)];
  return make_memfd((kMemfd + std::to_string(number)).c_str(), bytes);
}

/// The number of the device whose memory that is; -1: it is none.
int device_of_memory(int descriptor) {
  const std::string name = name_of_memfd(descriptor);
  return name.starts_with(kMemfd) ? std::atoi(name.c_str() + sizeof kMemfd - 1) : -1;
}

/// Whether kernels on a device may use memory of another one, seen by this process or not.
bool in_reach(const State& all, int device, int number) {
  return all.config.peers || all.visible[static_cast<size_t>(device)] == number;
}

/// Lets a mapping of another device's memory lose what the settings say.
void lose(const State& all, Region& region, DevicePointer address, int descriptor, int from) {
  const std::string pair =
      std::to_string(from) + ">" + std::to_string(device_of_memory(descriptor));
  const auto drops = [&](const std::string& what) {
    return ("," + all.config.drops + ",").find("," + what + ":" + pair + ",") != std::string::npos;
  };
  region.drops_words = drops("words");
  const bool reads = drops("reads");
  if (reads || drops("writes"))  // copied at the first write, or nothing at all
    ::mmap(host(address), whole_pages(region.bytes), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_FIXED | (reads ? MAP_ANONYMOUS : 0), reads ? -1 : descriptor, 0);
}

void drop_if_unused(State& all, PhysicalHandle handle) {
  const auto found = all.physicals.find(handle);
  if (!found->second.released || found->second.mappings > 0) return;
  ::close(found->second.descriptor);
  all.physicals.erase(found);
}

/// The contents of an IPC handle.
struct Ipc {
  char magic[8];
  pid_t process;
  int descriptor;
  size_t bytes;
};

}  // namespace

void farandole::cuda::fake::free_all(State& all, const CUctx_st* context) {
  for (auto it = all.regions.begin(); it != all.regions.end();) {
    const auto next = std::next(it);
    if (it->second.context == context) remove(all, it);
    it = next;
  }
  std::erase_if(all.physicals, [&](const auto& entry) {
    if (entry.second.context != context) return false;
    ::close(entry.second.descriptor);
    return true;
  });
  std::erase_if(all.events, [&](const auto* event) { return event->context == context; });
  std::erase_if(all.modules, [&](const auto* module) { return module->context == context; });
  // Addresses are the process's, whichever context has reserved them.
  if (all.primary.empty()) all.reserved.clear();
}

FAKE_CUDA cuMemAlloc_v2(DevicePointer* address, size_t bytes) {
  return call("cuMemAlloc", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (bytes == 0) return kInvalidValue;
    if (bytes > all.config.memory || all.used_memory() > all.config.memory - bytes)
      return kOutOfMemory;
    const int descriptor = make_memory(all, *context, bytes);
    if (descriptor < 0) return 304;
    *address = map_new(descriptor, bytes);
    std::memset(host(*address), 0xcd, bytes);  // nobody may count on zeros
    all.regions[*address] = {RegionKind::allocated, context, bytes, descriptor};
    return kSuccess;
  });
}

FAKE_CUDA cuMemFree_v2(DevicePointer address) {
  return call("cuMemFree", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.regions.find(address);
    if (found != all.regions.end() && found->second.descriptor >= 0 &&
        others_have_it_open(found->second.descriptor))
      all.blame("cuMemFree while another process has the memory open");
    return free_region(all, "cuMemFree", RegionKind::allocated, address);
  });
}

FAKE_CUDA cuMemGetInfo_v2(size_t* free, size_t* total) {
  return call("cuMemGetInfo", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    *total = all.config.memory;
    *free = all.config.memory - all.used_memory();
    return kSuccess;
  });
}

FAKE_CUDA cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  return call("cuMemHostAlloc", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (bytes == 0) return kInvalidValue;
    const int descriptor = make_memory(all, *context, bytes);
    if (descriptor < 0) return 304;
    const DevicePointer at = map_new(descriptor, bytes);
    std::memset(host(at), 0xcd, bytes);
    all.regions[at] = {RegionKind::pinned, context, bytes, descriptor};
    *address = host(at);
    return kSuccess;
  });
}

FAKE_CUDA cuMemFreeHost(void* address) {
  return call("cuMemFreeHost", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    return free_region(all, "cuMemFreeHost", RegionKind::pinned,
                       reinterpret_cast<DevicePointer>(address));
  });
}

FAKE_CUDA cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  return call("cuMemHostRegister", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    const auto base = reinterpret_cast<DevicePointer>(address);
    if (bytes == 0 || base % kPage != 0) return kInvalidValue;
    if (!all.config.host_register) return kNotSupported;
    for (const auto& [at, region] : all.regions)
      if (at < base + bytes && base < at + region.bytes) return 712;
    all.regions[base] = {RegionKind::registered, context, bytes};
    all.regions[base].portable = (flags & kHostPortable) != 0;
    return kSuccess;
  });
}

FAKE_CUDA cuMemHostUnregister(void* address) {
  return call("cuMemHostUnregister", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    return free_region(all, "cuMemHostUnregister", RegionKind::registered,
                       reinterpret_cast<DevicePointer>(address));
  });
}

FAKE_CUDA cuMemHostGetDevicePointer_v2(DevicePointer* address, void* of, unsigned) {
  return call(
      "cuMemHostGetDevicePointer", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
        *address = reinterpret_cast<DevicePointer>(of);
        const Region* const region = all.region_of("cuMemHostGetDevicePointer", *address, 1);
        if (region == nullptr) return kInvalidValue;
        const bool here = region->context == context || region->portable;
        const bool of_host =
            region->kind == RegionKind::pinned || region->kind == RegionKind::registered;
        return here && of_host ? kSuccess : kInvalidValue;
      });
}

FAKE_CUDA cuPointerGetAttribute(void* into, int attribute, DevicePointer address) {
  return call("cuPointerGetAttribute", Needs::driver, [&](State& all, Lock&, CUctx_st*) {
    const auto after = all.regions.upper_bound(address);
    if (attribute != kOrdinalOfPointer || after == all.regions.begin()) return kInvalidValue;
    const auto& [base, region] = *std::prev(after);
    if (address >= base + region.bytes) return kInvalidValue;
    std::memcpy(into, &region.context->device, sizeof region.context->device);
    return kSuccess;
  });
}

FAKE_CUDA cuIpcGetMemHandle(IpcMemoryHandle* handle, DevicePointer address) {
  return call("cuIpcGetMemHandle", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.regions.find(address);
    if (found == all.regions.end() || found->second.kind != RegionKind::allocated)
      return kInvalidValue;
    const Ipc ipc{"fakeipc", ::getpid(), found->second.descriptor, found->second.bytes};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &ipc, sizeof ipc);
    return kSuccess;
  });
}

FAKE_CUDA cuIpcOpenMemHandle_v2(DevicePointer* address, IpcMemoryHandle handle, unsigned) {
  return call("cuIpcOpenMemHandle", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    Ipc ipc{};
    std::memcpy(&ipc, &handle, sizeof ipc);
    if (std::strcmp(ipc.magic, "fakeipc") != 0) return kInvalidValue;
    if (ipc.process == ::getpid()) return 201;
    const std::string origin = std::to_string(ipc.process) + "/" + std::to_string(ipc.descriptor);
    for (auto& [base, region] : all.regions)
      if (region.kind == RegionKind::opened && region.origin == origin) {
        ++region.opened;
        *address = base;
        return kSuccess;
      }
    const int descriptor = open_again(ipc.process, ipc.descriptor);
    const int number = device_of_memory(descriptor);
    if (number < 0 || !in_reach(all, context->device, number)) {
      if (descriptor >= 0) ::close(descriptor);
      return number < 0 ? kInvalidValue : 217;
    }
    ::flock(descriptor, LOCK_SH);  // its owner sees that it is open here
    *address = map_new(descriptor, ipc.bytes);
    Region region{RegionKind::opened, context, ipc.bytes, descriptor};
    region.origin = origin;
    lose(all, region, *address, descriptor, all.visible[static_cast<size_t>(context->device)]);
    all.regions[*address] = region;
    return kSuccess;
  });
}

FAKE_CUDA cuIpcCloseMemHandle(DevicePointer address) {
  return call("cuIpcCloseMemHandle", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.regions.find(address);
    if (found != all.regions.end() && found->second.opened > 1) {
      --found->second.opened;
      return kSuccess;
    }
    return free_region(all, "cuIpcCloseMemHandle", RegionKind::opened, address);
  });
}

FAKE_CUDA cuMemGetAllocationGranularity(size_t* bytes, const PhysicalProperties* properties, int) {
  return call("cuMemGetAllocationGranularity", Needs::driver, [&](State& all, Lock&, CUctx_st*) {
    if (!all.config.virtual_memory) return kNotSupported;
    if (properties->type != kPinnedAllocation) return kInvalidValue;
    *bytes = kGranularity;
    return kSuccess;
  });
}

FAKE_CUDA cuMemCreate(PhysicalHandle* handle, size_t bytes, const PhysicalProperties* properties,
                      unsigned long long) {
  return call("cuMemCreate", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.config.virtual_memory) return kNotSupported;
    if (bytes == 0 || bytes % kGranularity != 0 || properties->type != kPinnedAllocation ||
        properties->location.type != kOnDevice || properties->location.id != context->device)
      return kInvalidValue;
    if (bytes > all.config.memory || all.used_memory() > all.config.memory - bytes)
      return kOutOfMemory;
    const int descriptor = make_memory(all, *context, bytes);
    if (descriptor < 0) return 304;
    *handle = ++all.last_physical;
    all.physicals[*handle] = {context, bytes, descriptor};
    all.physicals[*handle].exportable = (properties->handle_types & kByDescriptor) != 0;
    return kSuccess;
  });
}

FAKE_CUDA cuMemRelease(PhysicalHandle handle) {
  return call("cuMemRelease", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.physicals.find(handle);
    if (found == all.physicals.end() || found->second.released) {
      all.blame("cuMemRelease of what is not there");
      return kInvalidValue;
    }
    found->second.released = true;
    drop_if_unused(all, handle);
    return kSuccess;
  });
}

FAKE_CUDA cuMemAddressReserve(DevicePointer* address, size_t bytes, size_t, DevicePointer,
                              unsigned long long) {
  return call("cuMemAddressReserve", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    if (bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
    *address = map_new(-1, bytes);
    if (*address == 0) return kOutOfMemory;
    all.reserved[*address] = bytes;
    return kSuccess;
  });
}

FAKE_CUDA cuMemAddressFree(DevicePointer address, size_t bytes) {
  return call("cuMemAddressFree", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.reserved.find(address);
    if (found == all.reserved.end() || found->second != bytes) {
      all.blame("cuMemAddressFree of what is not reserved");
      return kInvalidValue;
    }
    if (all.regions.contains(address)) {
      all.blame("cuMemAddressFree while memory is mapped there");
      return kInvalidValue;
    }
    all.reserved.erase(found);
    return kSuccess;
  });
}

FAKE_CUDA cuMemMap(DevicePointer address, size_t bytes, size_t offset, PhysicalHandle handle,
                   unsigned long long) {
  return call("cuMemMap", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    const auto physical = all.physicals.find(handle);
    const auto reserved = all.reserved.find(address);
    if (physical == all.physicals.end() || reserved == all.reserved.end() || offset != 0 ||
        bytes > physical->second.bytes || bytes > reserved->second)
      return kInvalidValue;
    if (all.regions.contains(address)) return 208;
    ::mmap(host(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->second.descriptor, 0);
    Region region{RegionKind::mapped, context, bytes};
    region.physical = handle;
    region.accessible = false;
    all.regions[address] = region;
    all.gone.erase(address);
    ++physical->second.mappings;
    return kSuccess;
  });
}

FAKE_CUDA cuMemUnmap(DevicePointer address, size_t bytes) {
  return call("cuMemUnmap", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.regions.find(address);
    if (found != all.regions.end() && found->second.bytes != bytes) return kInvalidValue;
    const PhysicalHandle handle = found != all.regions.end() ? found->second.physical : 0;
    const int code = free_region(all, "cuMemUnmap", RegionKind::mapped, address);
    if (code != kSuccess) return code;
    --all.physicals[handle].mappings;
    drop_if_unused(all, handle);
    return kSuccess;
  });
}

FAKE_CUDA cuMemSetAccess(DevicePointer address, size_t bytes, const MemoryAccess* access,
                         size_t count) {
  return call("cuMemSetAccess", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.regions.find(address);
    if (found == all.regions.end() || found->second.kind != RegionKind::mapped ||
        found->second.bytes != bytes || count != 1 || access->location.type != kOnDevice ||
        access->flags != kReadAndWrite)
      return kInvalidValue;
    if (access->location.id < 0 || access->location.id >= static_cast<int>(all.visible.size()))
      return kInvalidDevice;
    const Physical& physical = all.physicals[found->second.physical];
    if (!in_reach(all, access->location.id, device_of_memory(physical.descriptor)))
      return kInvalidDevice;
    ::mprotect(host(address), bytes, PROT_READ | PROT_WRITE);
    lose(all, found->second, address, physical.descriptor,
         all.visible[static_cast<size_t>(access->location.id)]);
    found->second.accessible = true;
    return kSuccess;
  });
}

FAKE_CUDA cuMemExportToShareableHandle(void* into, PhysicalHandle handle, int type,
                                       unsigned long long) {
  return call("cuMemExportToShareableHandle", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    const auto found = all.physicals.find(handle);
    if (found == all.physicals.end() || type != kByDescriptor || !found->second.exportable)
      return kInvalidValue;
    const int descriptor = ::dup(found->second.descriptor);
    if (descriptor < 0) return 304;
    std::memcpy(into, &descriptor, sizeof descriptor);
    return kSuccess;
  });
}

FAKE_CUDA cuMemImportFromShareableHandle(PhysicalHandle* handle, void* from, int type) {
  return call(
      "cuMemImportFromShareableHandle", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
        const auto given = static_cast<int>(reinterpret_cast<intptr_t>(from));
        struct stat status{};
        if (type != kByDescriptor || device_of_memory(given) < 0 || ::fstat(given, &status) != 0)
          return kInvalidValue;
        const int descriptor = ::fcntl(given, F_DUPFD_CLOEXEC, 0);
        if (descriptor < 0) return 304;
        *handle = ++all.last_physical;
        all.physicals[*handle] = {context, static_cast<size_t>(status.st_size), descriptor};
        return kSuccess;
      });
}
