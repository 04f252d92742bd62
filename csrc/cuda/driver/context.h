// The device's primary context, which all libraries of a process share: retained, never made, never
// reset. It is current on a thread only while we call the driver.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.h"
#include "cuda/driver/device.h"
#include "cuda/driver/status.h"

namespace farandole::cuda {

/// While it lives, what this thread calls spoils nobody's capture of a stream.
class CaptureMode {
 public:
  explicit CaptureMode(const DriverFunctions& functions) : functions_(functions) { exchange(); }
  ~CaptureMode() { exchange(); }
  CaptureMode(const CaptureMode&) = delete;
  CaptureMode& operator=(const CaptureMode&) = delete;

 private:
  void exchange() {
    if (functions_.ThreadExchangeStreamCaptureMode != nullptr)
      functions_.ThreadExchangeStreamCaptureMode(&other_);
  }
  const DriverFunctions& functions_;
  int other_ = kRelaxedCapture;  // the mode that this thread does not have now
};

class DeviceContext {
 public:
  /// Throws Error(device) with a sentence, also where our kernels do not run on the device.
  static std::shared_ptr<const DeviceContext> retain(std::shared_ptr<const Driver> driver,
                                                     int ordinal);
  /// Releases it: with the last object that lives in it.
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  const Driver& driver() const { return *driver_; }
  const DeviceProperties& device() const { return device_; }

  /// While it lives, the context is current on this thread; then what was current before. Within
  /// another one of the same context it asks the driver nothing, so several calls share one.
  class Use {
   public:
    /// Throws Error(forked) in a forked child, and the context's first lasting error once it is
    /// lost.
    explicit Use(const DeviceContext& context);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    const DriverFunctions* operator->() const { return &functions_; }

   private:
    const DriverFunctions& functions_;
    const DeviceContext* before_;  // of this thread, as long as this one lives
    bool is_within_;
    std::optional<CaptureMode> mode_;
  };

  /// Throws what `code` means: `call` came to it when we tried to do `tried`, a text or a function
  /// that makes one. `said`: more evidence.
  template <typename Tried>
  void check(DriverCode code, const char* call, const Tried& tried, const char* said = "") const {
    if (code == kSuccess) return;
    if constexpr (requires { tried(); })
      fail(code, call, tried(), said);
    else
      fail(code, call, tried, said);
  }

  /// For destructors: `free(functions)` with the context current. Its failure is said in the log,
  /// but for what an exit, a fork or an earlier lasting error explains.
  template <typename Free>
  void at_end(const char* call, const Free& free) const noexcept {
    const DriverFunctions* const functions = driver_->functions_at_end();
    if (functions == nullptr) return;
    const CaptureMode mode(*functions);
    DriverCode code = functions->CtxPushCurrent(handle_);
    const bool pushed = code == kSuccess;
    if (pushed) code = free(*functions);
    if (code != kSuccess) say_at_end(code, pushed ? call : "cuCtxPushCurrent");
    ContextHandle popped = nullptr;
    if (pushed) functions->CtxPopCurrent(&popped);
  }

  /// "of 80 bytes of the device, 5 are free": evidence where memory is exhausted.
  std::string memory_left() const noexcept;

  /// An error after which nothing in this context works any more; empty while there was none.
  std::optional<Error> lost() const;

 private:
  DeviceContext(std::shared_ptr<const Driver> driver, DeviceProperties device,
                ContextHandle handle);
  [[noreturn]] void fail(DriverCode code, const char* call, const std::string& tried,
                         const char* said) const;
  void say_at_end(DriverCode code, const char* call) const noexcept;

  std::shared_ptr<const Driver> driver_;
  DeviceProperties device_;
  ContextHandle handle_;
  mutable std::atomic<bool> is_lost_{false};
  mutable std::mutex losing_;          // guards lost_
  mutable std::optional<Error> lost_;  // the first
};

}  // namespace farandole::cuda
