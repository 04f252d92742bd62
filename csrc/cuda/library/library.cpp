// The only export of _cuda.so: a function that hands out its table.
#include "base/fixed_text.h"
#include "cuda/driver/device.h"
#include "cuda/library/copying.h"
#include "cuda/library/exchanging.h"
#include "cuda/library/guarded.h"
#include "cuda/library/kernel_image.h"
#include "cuda/nccl/nccl_functions.h"

namespace farandole::cuda {
namespace {

int32_t driver_version(CudaFailure* failure) {
  return guarded(failure, [] { return Driver::of_process()->version(); });
}

int32_t device_count(CudaFailure* failure) {
  return guarded(failure, [] { return Driver::of_process()->device_count(); });
}

int32_t device(int32_t ordinal, CudaDevice* into, CudaFailure* failure) {
  return guarded(failure, [&] {
    const auto driver = Driver::of_process();
    const DeviceProperties found = device_properties(*driver, ordinal);
    into->capability = found.capability;
    into->multiprocessors = found.multiprocessors;
    into->memory_bytes = found.memory_bytes;
    into->instance = found.instance;
    into->descriptors = found.descriptors;
    into->multicast = found.multicast;
    copy_cut(found.name, into->name);
    copy_cut(found.uuid_text(), into->uuid);
    copy_cut(found.bus_id, into->bus_id);
    std::string unfit = found.why_unfit();
    if (unfit.empty()) unfit = why_not_loaded(kernel_build(), driver->version(), found);
    copy_cut(unfit, into->unfit);
    return 1;
  });
}

void look_for_nccl_in(const char* setting, const char* wheel) {
  NcclLibrary::look_in({setting, wheel});
}

int32_t find_nccl(CudaNcclLibrary* found, CudaFailure* failure) {
  return guarded(failure, [&] {
    const NcclLibrary& library = NcclLibrary::of_process();
    found->version = library.version;
    copy_cut(library.file, found->file);
    return 1;
  });
}

}  // namespace
}  // namespace farandole::cuda

/// Null where another version is asked for than this library has.
extern "C" __attribute__((visibility("default"))) const farandole::CudaTable* farandole_cuda_table(
    uint32_t version) {
  using namespace farandole;
  static const CudaTable table = [] {
    CudaTable made{};
    made.version = kCudaTableVersion;
    made.bytes = sizeof made;
    made.nvcc = cuda::kernel_build().nvcc;
    made.driver_version = cuda::driver_version;
    made.device_count = cuda::device_count;
    made.device = cuda::device;
    made.look_for_nccl_in = cuda::look_for_nccl_in;
    made.find_nccl = cuda::find_nccl;
    cuda::add_copying(made);
    cuda::add_exchanging(made);
    return made;
  }();
  return version == kCudaTableVersion ? &table : nullptr;
}
