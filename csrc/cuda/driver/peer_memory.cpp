#include "cuda/driver/peer_memory.h"

#include "cuda/driver/virtual_memory.h"

namespace farandole::cuda {
namespace {

/// Processes may see the same devices by other numbers, or not at all.
bool sees(const DeviceContext& context, const DeviceUuid& uuid) {
  const DeviceProperties& here = context.device();
  if (here.uuid == uuid) return true;
  for (const DeviceProperties& device : all_devices(context.driver())) {
    if (device.uuid != uuid) continue;
    if (reaches(context.driver(), here, device)) return true;
    throw Error(ErrorCode::device, here.label() + " cannot reach the memory of " + device.label(),
                {}, "let the ranks use host memory");
  }
  return false;
}

/// The driver's refusal to map memory on a device that this process does not see.
Error out_of_sight(const Error& refusal, const DeviceUuid& uuid) {
  DeviceProperties hidden;
  hidden.uuid = uuid;
  return Error(ErrorCode::device,
               "this process does not see " + hidden.uuid_text() +
                   ", whose memory a peer shares, and cannot map it: " + refusal.verdict(),
               refusal.where(), "let CUDA_VISIBLE_DEVICES show all ranks' devices to each rank");
}

class ByDescriptor : public PeerMemory {
 public:
  ByDescriptor(std::shared_ptr<const DeviceContext> context, const MemoryExport& shared)
      : PeerMemory(std::move(context), shared.bytes),
        physical_(PhysicalMemory::from(context_, shared.descriptor)),
        mapping_(context_, physical_, bytes_) {
    address_ = mapping_.address();
  }

 private:
  PhysicalMemory physical_;
  VirtualMapping mapping_;
};

class ByIpcHandle : public PeerMemory {
 public:
  ByIpcHandle(std::shared_ptr<const DeviceContext> context, const MemoryExport& shared)
      : PeerMemory(std::move(context), shared.bytes) {
    const DeviceContext::Use driver(*context_);
    context_->check(driver->IpcOpenMemHandle(&address_, shared.handle, kIpcLazyPeerAccess),
                    "cuIpcOpenMemHandle", "use another process's memory");
  }
  ~ByIpcHandle() override {
    context_->at_end("cuIpcCloseMemHandle",
                     [&](const auto& driver) { return driver.IpcCloseMemHandle(address_); });
  }
};

}  // namespace

std::shared_ptr<PeerMemory> PeerMappings::open(const MemoryExport& shared) const {
  const bool seen = sees(*context_, shared.device);
  if (shared.kind == ExportKind::descriptor && !context_->device().descriptors)
    throw Error(ErrorCode::device,
                context_->device().label() + " cannot map memory by its descriptor", {},
                "let the ranks use host memory");
  try {
    if (shared.kind == ExportKind::ipc) return std::make_shared<ByIpcHandle>(context_, shared);
    return std::make_shared<ByDescriptor>(context_, shared);
  } catch (const Error& refusal) {
    if (seen) throw;
    throw out_of_sight(refusal, shared.device);
  }
}

std::shared_ptr<PeerMemory> PeerMappings::map(const MemoryExport& shared) {
  if (shared.id.process == own_process())
    throw Error(ErrorCode::internal, "memory of this process is no peer's");
  const std::lock_guard lock(mutex_);
  std::erase_if(open_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto known = open_.find(shared.id); known != open_.end())
    if (auto memory = known->second.lock()) return memory;
  auto memory = open(shared);
  open_[shared.id] = memory;
  return memory;
}

}  // namespace farandole::cuda
