#include "cuda/driver/context.h"

#include <utility>

#include "base/log.h"

namespace farandole::cuda {
namespace {

thread_local const DeviceContext* in_use = nullptr;  // by a Use

}  // namespace

std::shared_ptr<const DeviceContext> DeviceContext::retain(std::shared_ptr<const Driver> driver,
                                                           int ordinal) {
  const DriverFunctions& functions = driver->functions();
  DeviceProperties device = device_properties(*driver, ordinal);
  if (const std::string why = device.why_unfit(); !why.empty())
    throw Error(ErrorCode::device, why, {}, "use a newer device, or let the ranks use host memory");
  ContextHandle handle = nullptr;
  const DriverCode code = functions.DevicePrimaryCtxRetain(&handle, device.handle);
  if (code != kSuccess)
    throw status_error(functions, code, "cuDevicePrimaryCtxRetain", "use " + device.label());
  return std::shared_ptr<const DeviceContext>(
      new DeviceContext(std::move(driver), std::move(device), handle));
}

DeviceContext::DeviceContext(std::shared_ptr<const Driver> driver, DeviceProperties device,
                             ContextHandle handle)
    : driver_(std::move(driver)), device_(std::move(device)), handle_(handle) {}

DeviceContext::~DeviceContext() {
  const DriverFunctions* const functions = driver_->functions_at_end();
  if (functions == nullptr) return;
  const DriverCode code = functions->DevicePrimaryCtxRelease(device_.handle);
  if (code != kSuccess) say_at_end(code, "cuDevicePrimaryCtxRelease");
}

DeviceContext::Use::Use(const DeviceContext& context)
    : functions_(context.driver_->functions()), before_(in_use), is_within_(before_ == &context) {
  if (context.is_lost_.load(std::memory_order_acquire)) throw *context.lost();
  if (is_within_) return;
  mode_.emplace(functions_);
  context.check(functions_.CtxPushCurrent(context.handle_), "cuCtxPushCurrent",
                "enter the context");
  in_use = &context;
}

DeviceContext::Use::~Use() {
  if (is_within_) return;
  ContextHandle popped = nullptr;
  functions_.CtxPopCurrent(&popped);  // fails only where what we pushed is gone
  in_use = before_;
}

void DeviceContext::fail(DriverCode code, const char* call, const std::string& tried,
                         const char* said) const {
  const Error error =
      status_error(driver_->functions(), code, call, tried + " on " + device_.label(), said);
  if (is_lasting(code)) {
    const std::lock_guard lock(losing_);
    if (!lost_) {
      Context where;
      where.evidence = error.verdict() + "; " + error.where().evidence;
      lost_.emplace(error.code(),
                    device_.label() + " is lost to this process since an earlier error", where,
                    error.advice());
    }
    is_lost_.store(true, std::memory_order_release);
  }
  throw error;
}

std::optional<Error> DeviceContext::lost() const {
  const std::lock_guard lock(losing_);
  return lost_;
}

std::string DeviceContext::memory_left() const noexcept {
  size_t left = 0, whole = 0;
  at_end("cuMemGetInfo", [&](const auto& driver) { return driver.MemGetInfo(&left, &whole); });
  if (whole == 0) return "";
  return "of " + std::to_string(whole) + " bytes of the device, " + std::to_string(left) +
         " are free";
}

void DeviceContext::say_at_end(DriverCode code, const char* call) const noexcept {
  if (code == kDeinitialized || is_lost_.load(std::memory_order_acquire)) return;
  try {
    const Error error =
        status_error(*driver_->functions_at_end(), code, call, "clean up on " + device_.label());
    log(LogLevel::warning, error.what());
  } catch (const std::exception&) {  // NOLINT: no memory is left for words
  }
}

}  // namespace farandole::cuda
