// What _cuda.so exports: one function, which hands out its table.
#include <exception>

#include "base/cuda_table.h"
#include "base/error.h"
#include "base/fixed_text.h"
#include "cuda/driver/device.h"
#include "cuda/library/kernel_image.h"

namespace farandole::cuda {
namespace {

void tell(const Error& error, CudaFailure* failure) {
  failure->kind = 1 + static_cast<int32_t>(error.code());
  copy_cut(error.verdict(), failure->verdict);
  copy_cut(error.where().evidence, failure->evidence);
  copy_cut(error.advice(), failure->advice);
}

/// What `act` returns; 0 where it throws, with what it threw.
template <typename Act>
int32_t guarded(CudaFailure* failure, const Act& act) {
  try {
    return act();
  } catch (const Error& error) {
    tell(error, failure);
  } catch (const std::exception& error) {
    tell(Error(ErrorCode::internal, error.what()), failure);
  }
  return 0;
}

int32_t driver_version(CudaFailure* failure) {
  return guarded(failure, [] { return Driver::of_process()->version(); });
}

int32_t device_count(CudaFailure* failure) {
  return guarded(failure, [] { return Driver::of_process()->device_count(); });
}

int32_t device(int32_t ordinal, CudaDevice* into, CudaFailure* failure) {
  return guarded(failure, [&] {
    const DeviceProperties found = device_properties(*Driver::of_process(), ordinal);
    into->capability = found.capability;
    into->multiprocessors = found.multiprocessors;
    into->memory_bytes = found.memory_bytes;
    into->instance = found.instance;
    into->descriptors = found.descriptors;
    copy_cut(found.name, into->name);
    copy_cut(found.uuid_text(), into->uuid);
    copy_cut(found.bus_id, into->bus_id);
    copy_cut(found.why_unfit(), into->unfit);
    return 1;
  });
}

}  // namespace
}  // namespace farandole::cuda

/// Null where another version is asked for than this library has.
extern "C" __attribute__((visibility("default"))) const farandole::CudaTable* farandole_cuda_table(
    uint32_t version) {
  using namespace farandole;
  static const CudaTable table{
      kCudaTableVersion,    sizeof(CudaTable),  cuda::kernel_image() != nullptr,
      cuda::driver_version, cuda::device_count, cuda::device};
  return version == kCudaTableVersion ? &table : nullptr;
}
