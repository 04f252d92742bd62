#include "cuda/driver/peer_memory.h"

#include "cuda/driver/virtual_memory.h"

namespace farandole::cuda {
namespace {

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
  if (shared.kind == ExportKind::ipc) return std::make_shared<ByIpcHandle>(context_, shared);
  if (!context_->device().descriptors)
    throw Error(ErrorCode::device,
                context_->device().label() + " cannot map memory by its descriptor", {},
                "let the ranks use host memory");
  return std::make_shared<ByDescriptor>(context_, shared);
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
