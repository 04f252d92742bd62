#include "devices/library.h"

#include <mutex>

#include "base/fixed_text.h"

namespace farandole {
namespace {

struct Finding {
  std::mutex mutex;  // guards the rest
  std::function<const CudaTable*()> find;
  const CudaTable* found = nullptr;
};

Finding& finding() {
  static auto* const one = new Finding;  // frameworks' threads may outlive everything else
  return *one;
}

}  // namespace

void find_cuda_by(std::function<const CudaTable*()> find) {
  const std::lock_guard lock(finding().mutex);
  finding().find = std::move(find);
}

const CudaTable& cuda_library() {
  Finding& all = finding();
  const std::lock_guard lock(all.mutex);
  if (all.found == nullptr) {
    if (!all.find) throw Error(ErrorCode::device, "nobody has said where the library for CUDA is");
    all.found = all.find();
    if (all.found->version != kCudaTableVersion || all.found->bytes != sizeof(CudaTable)) {
      all.found = nullptr;
      throw Error(ErrorCode::device, "the library for CUDA is of another version of farandole");
    }
  }
  ask_cuda(all.found->device_count);
  return *all.found;
}

Error error_of(const CudaFailure& failure) {
  Context where;
  where.evidence = text_in(failure.evidence);
  return {static_cast<ErrorCode>(failure.kind - 1), text_in(failure.verdict), where,
          text_in(failure.advice)};
}

}  // namespace farandole
