#include "cuda/library/nvls_bucket.h"

#include <cstring>
#include <utility>

#include "cuda/plans.h"

namespace farandole::cuda {
namespace {

constexpr int kLeastCapability = 90;

constexpr const char* kKernels[] = {
#define KERNEL(name, Parameters, function) #name,
#include "cuda/kernels/nvls_table.h"
#undef KERNEL
};

std::string why_not(const DeviceProperties& device) {
  if (device.capability < kLeastCapability)
    return "has compute capability " + std::to_string(device.capability / 10) + "." +
           std::to_string(device.capability % 10) + ", and NVLS takes 9.0";
  if (!device.multicast) return "has no switch that folds (NVLS), or its driver does not show it";
  return "";
}

}  // namespace

std::shared_ptr<const NvlsBucket::Kernels> NvlsBucket::load_kernels(
    const std::shared_ptr<const DeviceContext>& context, const void* image) {
  if (image == nullptr || !why_not(context->device()).empty()) return nullptr;
  auto kernels = std::make_shared<Kernels>();
  const auto module = DeviceModule::load(context, image);
  for (const char* name : kKernels) kernels->emplace(name, module->function(name));
  return kernels;
}

NvlsBucket::NvlsBucket(std::shared_ptr<const DeviceContext> context, uint32_t rank, uint32_t size,
                       uint64_t strand_bytes, std::shared_ptr<const Kernels> kernels)
    : context_(std::move(context)),
      rank_(rank),
      size_(size),
      strand_bytes_(strand_bytes),
      kernels_(std::move(kernels)) {
  const DeviceProperties& device = context_->device();
  if (const std::string why = why_not(device); !why.empty())
    throw Error(ErrorCode::device, device.label() + " " + why);
}

Fd NvlsBucket::offer(CudaNvls& mine) {
  static_assert(sizeof mine.device == sizeof(DeviceUuid));
  std::memcpy(mine.device, context_->device().uuid.bytes, sizeof mine.device);
  mine.bytes = 0;
  if (rank_ != 0) return {};
  const auto devices = static_cast<int>(size_);
  mine.bytes = Multicast::whole_bytes(*context_, devices, kCudaStrands * strand_bytes_);
  multicast_ = Multicast::make(context_, devices, mine.bytes);
  return multicast_->descriptor();
}

void NvlsBucket::join(const CudaNvls& first, const Fd& descriptor) {
  if (first.bytes < kCudaStrands * strand_bytes_)
    throw Error(ErrorCode::internal, "the first rank's multicast object is smaller than ours");
  if (!multicast_)
    multicast_ = Multicast::from(context_, descriptor, static_cast<int>(size_), first.bytes);
  multicast_->add_device();
}

const DeviceFunction& NvlsBucket::kernel(DType dtype) const {
  return kernels_->at(kernel_name("nvls", dtype));
}

}  // namespace farandole::cuda
