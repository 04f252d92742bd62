#include "test_kernels.h"

#include <utility>

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

bool& failure() {
  thread_local bool failed = false;
  return failed;
}

void go_wrong(const void*) { fail_kernel(); }

const Kernel kKernels[] = {{"test_add", sizeof(TestAdd), add},
                           {"test_wait", sizeof(TestWait), wait},
                           {"test_fail", sizeof(TestFail), go_wrong}};

}  // namespace

void fail_kernel() { failure() = true; }
bool take_kernel_failure() { return std::exchange(failure(), false); }

const Kernel* test_kernel(const std::string& name) {
  for (const Kernel& kernel : kKernels)
    if (kernel.name == name) return &kernel;
  return nullptr;
}

}  // namespace farandole::cuda::fake
