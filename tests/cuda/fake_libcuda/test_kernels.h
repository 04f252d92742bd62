// Kernels for tests of the driver layer itself, beside those of csrc/cuda/kernels.
#pragma once

#include <cstdint>

namespace farandole::cuda {

/// "test_add": words[i] += value, by its first thread.
struct TestAdd {
  uint32_t* words = nullptr;
  uint64_t count = 0;
  uint32_t value = 0;
};

/// "test_wait": ends when the word is `value` or more, or `abort` is not zero.
struct TestWait {
  uint32_t* word = nullptr;
  const uint32_t* abort = nullptr;
  uint32_t value = 0;
};

/// "test_fail": goes wrong, as a kernel that uses an address that is not there.
struct TestFail {
  uint32_t nothing = 0;
};

}  // namespace farandole::cuda
