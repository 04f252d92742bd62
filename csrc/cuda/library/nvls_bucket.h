// One rank's part in a multicast object of an exchange: a bucket of its own, whose copies on all
// devices the switch between them folds.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/cuda_table.h"
#include "base/dtype.h"
#include "cuda/driver/module.h"
#include "cuda/driver/multicast.h"

namespace farandole::cuda {

class NvlsBucket {
 public:
  using Kernels = std::map<std::string, DeviceFunction>;  // by name
  /// All, of an image that may be null. Null where the device can use none.
  static std::shared_ptr<const Kernels> load_kernels(
      const std::shared_ptr<const DeviceContext>& context, const void* image);

  /// Throws Error(device) where the device lacks what it takes.
  NvlsBucket(std::shared_ptr<const DeviceContext> context, uint32_t rank, uint32_t size,
             uint64_t strand_bytes, std::shared_ptr<const Kernels> kernels);

  /// This rank's offer to the others. On the first rank, which makes the object, returns its
  /// descriptor.
  Fd offer(CudaNvls& mine);
  /// With what the first one has offered.
  void join(const CudaNvls& first, const Fd& descriptor);
  /// Once all have joined.
  void bind() { multicast_->bind(); }

  /// This rank's own memory, and that of all at once.
  DevicePointer own(int32_t strand) const { return multicast_->own() + offset_of(strand); }
  DevicePointer all(int32_t strand) const { return multicast_->all() + offset_of(strand); }
  const DeviceFunction& kernel(DType dtype) const;

  /// Stops using other ranks' memory. They may still use this one's, until its end.
  void let_go() noexcept {
    if (multicast_) multicast_->unmap();
  }

 private:
  uint64_t offset_of(int32_t strand) const { return static_cast<uint64_t>(strand) * strand_bytes_; }

  std::shared_ptr<const DeviceContext> context_;
  uint32_t rank_, size_;
  uint64_t strand_bytes_;
  std::shared_ptr<const Kernels> kernels_;
  std::unique_ptr<Multicast> multicast_;
};

}  // namespace farandole::cuda
