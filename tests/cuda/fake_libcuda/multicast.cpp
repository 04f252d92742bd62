// Multicast objects: a memfd says which processes have bound which memory. Kernels' multimem
// accesses map what they need of it; nothing else may use an address of such an object.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "state.h"

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

namespace {

constexpr char kObjectMemfd[] = "fake-multicast";
using Bound = MulticastTable::Bound;

MulticastTable* map_table(int descriptor) {
  void* const at =
      ::mmap(nullptr, sizeof(MulticastTable), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return at == MAP_FAILED ? nullptr : static_cast<MulticastTable*>(at);
}

/// Memory of a member, mapped into this process: it outlives the process that has bound it.
void* map_member(const MulticastTable& table, const MulticastTable::Member& member) {
  const int descriptor = open_again(member.process, member.descriptor);
  void* const at = ::mmap(nullptr, table.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  return at == MAP_FAILED ? nullptr : at;
}

/// For the executor.
std::vector<void*> members_at(const void* address, size_t bytes) {
  State& all = state();
  const Lock lock(all.mutex);
  const auto at = reinterpret_cast<DevicePointer>(address);
  const Region* const region = all.region_of("a multimem access", at, bytes);
  const auto physical = all.physicals.find(region != nullptr ? region->physical : 0);
  if (physical == all.physicals.end() || physical->second.multicast == nullptr) {
    all.blame("a multimem access where no multicast object is mapped");
    fail_kernel();
    return {};
  }
  Physical& object = physical->second;
  object.members.resize(static_cast<size_t>(object.multicast->devices));
  const DevicePointer base = std::prev(all.regions.upper_bound(at))->first;
  std::map<int, void*> found;  // by device
  for (size_t i = 0; i < object.members.size(); ++i) {
    const MulticastTable::Member& member = object.multicast->members[i];
    const bool bound = member.bound == Bound::yes;
    if (bound && object.members[i] == nullptr)
      object.members[i] = map_member(*object.multicast, member);
    if (!bound || object.members[i] == nullptr) {
      all.blame("a multimem access while device " + std::to_string(member.device) +
                " has no memory bound");
      fail_kernel();
      return {};
    }
    found[member.device] = static_cast<std::byte*>(object.members[i]) + (at - base);
  }
  std::vector<void*> members;
  for (const auto& [device, address_there] : found) members.push_back(address_there);
  return members;
}

const bool registered = [] {
  set_multicast(members_at);
  return true;
}();

/// One call about a multicast object.
template <typename Body>
int of_object(const char* name, PhysicalHandle handle, const Body& body) {
  return call(name, Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.config.multicast) return static_cast<int>(kNotSupported);
    const auto found = all.physicals.find(handle);
    if (found == all.physicals.end() || found->second.multicast == nullptr)
      return static_cast<int>(kInvalidValue);
    return static_cast<int>(body(all, found->second, context));
  });
}

int number_of(const State& all, int device) { return all.visible[static_cast<size_t>(device)]; }

}  // namespace

bool MulticastTable::has_all() const {
  return std::all_of(members, members + devices, [](const Member& m) { return m.device >= 0; });
}

MulticastTable::Member* MulticastTable::of(int device) {
  Member* const found =
      std::find_if(members, members + devices, [&](const Member& m) { return m.device == device; });
  return found == members + devices ? nullptr : found;
}

MulticastTable* farandole::cuda::fake::open_multicast(int descriptor) {
  return name_of_memfd(descriptor) == kObjectMemfd ? map_table(descriptor) : nullptr;
}

void farandole::cuda::fake::close_multicast(const Physical& physical) {
  if (physical.multicast == nullptr) return;
  for (void* const member : physical.members)
    if (member != nullptr) ::munmap(member, physical.bytes);
  ::munmap(physical.multicast, sizeof(MulticastTable));
}

bool farandole::cuda::fake::may_map(State& all, const Physical& physical) {
  if (physical.multicast == nullptr || physical.multicast->has_all()) return true;
  all.blame("cuMemMap of a multicast object would wait for devices that nobody has added");
  return false;
}

FAKE_CUDA cuMulticastGetGranularity(size_t* bytes, const MulticastProperties* properties, int) {
  return call("cuMulticastGetGranularity", Needs::driver, [&](State& all, Lock&, CUctx_st*) {
    if (!all.config.multicast) return kNotSupported;
    if (properties->devices == 0 || properties->flags != 0) return kInvalidValue;
    *bytes = kGranularity;
    return kSuccess;
  });
}

FAKE_CUDA cuMulticastCreate(PhysicalHandle* handle, const MulticastProperties* properties) {
  return call("cuMulticastCreate", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.config.multicast) return static_cast<int>(kNotSupported);
    if (properties->devices == 0 || properties->devices > MulticastTable::kMost ||
        properties->bytes == 0 || properties->bytes % kGranularity != 0 || properties->flags != 0)
      return static_cast<int>(kInvalidValue);
    const int descriptor = make_memfd(kObjectMemfd, sizeof(MulticastTable));
    if (descriptor < 0) return 304;
    auto* const table = new (map_table(descriptor)) MulticastTable;
    table->devices = static_cast<int>(properties->devices);
    table->bytes = properties->bytes;
    *handle = ++all.last_physical;
    Physical& made = all.physicals[*handle] = {context, properties->bytes, descriptor};
    made.exportable = (properties->handle_types & kByDescriptor) != 0;
    made.multicast = table;
    return static_cast<int>(kSuccess);
  });
}

FAKE_CUDA cuMulticastAddDevice(PhysicalHandle handle, int device) {
  return of_object("cuMulticastAddDevice", handle, [&](State& all, Physical& object, CUctx_st*) {
    if (device < 0 || device >= static_cast<int>(all.visible.size())) return kInvalidDevice;
    const int number = number_of(all, device);
    if (object.multicast->of(number) != nullptr) return kInvalidValue;
    for (int i = 0; i < object.multicast->devices; ++i) {
      int nobody = -1;
      if (object.multicast->members[i].device.compare_exchange_strong(nobody, number))
        return kSuccess;
    }
    return kInvalidValue;
  });
}

FAKE_CUDA cuMulticastBindMem(PhysicalHandle handle, size_t at, PhysicalHandle memory, size_t offset,
                             size_t bytes, unsigned long long) {
  return of_object("cuMulticastBindMem", handle, [&](State& all, Physical& object, CUctx_st*) {
    if (!object.multicast->has_all()) {
      all.blame("cuMulticastBindMem would wait for devices that nobody has added");
      return kInvalidValue;
    }
    const auto found = all.physicals.find(memory);
    if (found == all.physicals.end() || found->second.multicast != nullptr ||
        !found->second.exportable || at != 0 || offset != 0 || bytes % kGranularity != 0 ||
        bytes > found->second.bytes || bytes != object.bytes || object.bound != 0)
      return kInvalidValue;
    auto* const member = object.multicast->of(number_of(all, found->second.context->device));
    if (member == nullptr || member->bound != Bound::no) return kInvalidValue;
    member->process = ::getpid();
    member->descriptor = found->second.descriptor;
    member->bound = Bound::yes;
    object.bound = memory;
    ++found->second.mappings;
    return kSuccess;
  });
}

FAKE_CUDA cuMulticastUnbind(PhysicalHandle handle, int device, size_t at, size_t bytes) {
  return of_object("cuMulticastUnbind", handle, [&](State& all, Physical& object, CUctx_st*) {
    auto* const member = object.multicast->of(number_of(all, device));
    if (member == nullptr || object.bound == 0 || at != 0 || bytes != object.bytes) {
      all.blame("cuMulticastUnbind of what is not bound");
      return kInvalidValue;
    }
    member->bound = Bound::not_any_more;
    const PhysicalHandle memory = std::exchange(object.bound, 0);
    --all.physicals[memory].mappings;
    drop_if_unused(all, memory);
    return kSuccess;
  });
}
