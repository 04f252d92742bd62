#include "test_kernels.h"

#include <atomic>
#include <stdexcept>

#include "cuda/kernels/device.h"
#include "state.h"

namespace farandole::cuda::fake {
namespace {

bool is_first() { return thread_index() == 0 && block_index() == 0; }

void add(const void* given) {
  const auto& parameters = *static_cast<const TestAdd*>(given);
  if (is_first())
    for (uint64_t i = 0; i < parameters.count; ++i) parameters.words[i] += parameters.value;
}

void wait(const void* given) {
  const auto& parameters = *static_cast<const TestWait*>(given);
  wait_for(parameters.word, parameters.value, parameters.abort);
}

void go_wrong(const void*) { throw std::runtime_error("it uses a wrong address"); }

const Kernel kKernels[] = {{"test_add", sizeof(TestAdd), add},
                           {"test_wait", sizeof(TestWait), wait},
                           {"test_fail", sizeof(TestFail), go_wrong}};

}  // namespace

const Kernel* test_kernel(const std::string& name) {
  for (const Kernel& kernel : kKernels)
    if (kernel.name == name) return &kernel;
  return nullptr;
}

}  // namespace farandole::cuda::fake
