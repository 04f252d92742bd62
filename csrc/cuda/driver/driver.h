// The CUDA driver of this process: opened and initialized when CUDA is first asked for, and never
// by an import or by init(), since programs fork and choose their devices until then.
#pragma once

#include <memory>
#include <string>

#include "cuda/driver/functions.h"

namespace farandole::cuda {

/// From here on fatbins of CUDA 12 load, whichever minor version they are of.
inline constexpr int kOldestDriver = 12000;

class Driver {
 public:
  /// Throws Error(device) with one sentence: no driver, one that is too old or not complete, no
  /// device; Error(forked) in a child of a process that has initialized one.
  static std::shared_ptr<const Driver> open(const std::string& file = "libcuda.so.1");
  /// The process's own, opened by the first call that succeeds.
  static std::shared_ptr<const Driver> of_process();

  /// Throws Error(forked) in a forked child: a driver does not survive a fork.
  const DriverFunctions& functions() const;
  /// Null where no function may be called any more: for destructors.
  const DriverFunctions* functions_at_end() const noexcept;

  int version() const { return version_; }  // 12040: CUDA 12.4
  int device_count() const { return device_count_; }

 private:
  explicit Driver(const std::string& file);
  void initialize();

  DriverLibrary library_;
  DriverFunctions functions_;
  int version_ = 0;
  int device_count_ = 0;
};

/// Whether this is a child of a process that has used CUDA.
bool in_child_of_device_user() noexcept;

}  // namespace farandole::cuda
