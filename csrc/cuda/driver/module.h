// Kernels: a fatbin becomes a module of a context, its functions are launched with one plain
// struct.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "cuda/driver/stream.h"

namespace farandole::cuda {

/// The limit for the one struct of a launch, also with drivers and devices that take more.
inline constexpr size_t kMostParameterBytes = 4096;

struct LaunchShape {
  uint32_t blocks = 1, threads = 1;
};

class DeviceModule;

/// A kernel of a module, which lives on with it.
class DeviceFunction {
 public:
  const std::string& name() const { return name_; }

  /// Puts it into the stream. The struct is copied.
  template <typename Parameters>
  void launch(const StreamRef& stream, const LaunchShape& shape,
              const Parameters& parameters) const {
    static_assert(std::is_trivially_copyable_v<Parameters>);
    static_assert(sizeof(Parameters) <= kMostParameterBytes);
    launch_with(stream, shape, &parameters, sizeof parameters);
  }

 private:
  friend class DeviceModule;
  DeviceFunction(std::shared_ptr<const DeviceModule> module, std::string name);
  void launch_with(const StreamRef& stream, const LaunchShape& shape, const void* parameters,
                   size_t bytes) const;

  std::shared_ptr<const DeviceModule> module_;
  std::string name_;
  FunctionHandle handle_ = nullptr;
  size_t parameter_bytes_ = 0;  // 0: drivers before 12.4 do not say
  uint32_t most_threads_ = 0;
};

class DeviceModule : public std::enable_shared_from_this<DeviceModule> {
 public:
  /// `image`: a fatbin, cubin or PTX that stays where it is. All its users in one context share the
  /// module: loading one takes memory, and may wait for all that runs there. Throws
  /// Error(device) where it does not fit the device; the words of the driver's compiler are its
  /// evidence.
  static std::shared_ptr<const DeviceModule> load(std::shared_ptr<const DeviceContext> context,
                                                  const void* image);
  ~DeviceModule();
  DeviceModule(const DeviceModule&) = delete;
  DeviceModule& operator=(const DeviceModule&) = delete;

  /// Loads it at once: loading later, at its first launch, may wait for all that runs.
  DeviceFunction function(const std::string& name) const;

  const DeviceContext& context() const { return *context_; }
  ModuleHandle handle() const { return handle_; }

 private:
  DeviceModule(std::shared_ptr<const DeviceContext> context, const void* image);
  std::shared_ptr<const DeviceContext> context_;
  ModuleHandle handle_ = nullptr;
};

}  // namespace farandole::cuda
