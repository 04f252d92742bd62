#include "cuda/driver/driver.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

#include "base/error.h"
#include "cuda/driver/status.h"

namespace farandole::cuda {
namespace {

std::atomic<bool> initialized{false}, forked{false};

void watch_for_forks_of_driver() {
  // A fork before the first use does no harm: the child may begin for itself.
  static const int installed = ::pthread_atfork(nullptr, nullptr, [] {
    if (initialized.load(std::memory_order_relaxed)) forked.store(true, std::memory_order_relaxed);
  });
  (void)installed;
}

void refuse_in_child() {
  if (!in_child_of_device_user()) return;
  throw Error(ErrorCode::forked,
              "this process (pid " + std::to_string(::getpid()) +
                  ") was forked from one that uses CUDA, which does not survive a fork",
              {}, "start workers with spawn, or fork before CUDA is first used");
}

/// Explains the driver's answer "no device" by the settings that hide devices from this process.
Error no_device(const Error& said) {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr)
    return {
        ErrorCode::device, "the CUDA driver finds no device", said.where(),
        "look at what nvidia-smi shows; in MIG mode, make an instance; in a container, start it "
        "with access to the GPU"};
  const std::string text = visible;
  if (text.empty() || text == "-1" || text == "NoDevFiles")
    return {ErrorCode::device,
            "CUDA_VISIBLE_DEVICES is '" + text + "': it hides all devices from this process",
            said.where(), "unset it, or name a device in it"};
  const bool of_instance = text.starts_with("MIG-");
  return {ErrorCode::device,
          "CUDA_VISIBLE_DEVICES is '" + text + "', and the driver finds no such " +
              (of_instance ? "MIG instance" : "device"),
          said.where(),
          of_instance ? "name one of the instances that nvidia-smi -L shows"
                      : "name one of the devices that nvidia-smi -L shows"};
}

}  // namespace

bool in_child_of_device_user() noexcept { return forked.load(std::memory_order_relaxed); }

std::shared_ptr<const Driver> Driver::open(const std::string& file) {
  refuse_in_child();
  const std::shared_ptr<Driver> driver(new Driver(file));
  driver->initialize();
  return driver;
}

std::shared_ptr<const Driver> Driver::of_process() {
  static std::mutex opening;
  // Never destroyed: threads of a framework may outlive everything else.
  static auto* const kept = new std::shared_ptr<const Driver>;
  refuse_in_child();  // in which the mutex may be locked for ever
  const std::lock_guard lock(opening);
  if (!*kept) *kept = open();
  return *kept;
}

Driver::Driver(const std::string& file) : library_(file) {
  // The version comes first: an old driver is refused for its age, not for a missing function.
  const auto get_version = reinterpret_cast<DriverCode (*)(int*)>(
      library_.find("cuDriverGetVersion", "cuDriverGetVersion", 2020));
  if (get_version != nullptr) {
    if (const DriverCode code = get_version(&version_); code != kSuccess)
      throw status_error({}, code, "cuDriverGetVersion", "ask for the driver's version");
    if (version_ < kOldestDriver)
      throw Error(ErrorCode::device,
                  "the CUDA driver is too old: it is of CUDA " + version_text(version_) +
                      ", and the kernels need " + version_text(kOldestDriver),
                  {}, "install a driver of branch 525 or later");
  }
  functions_ = bind_functions([&](const char* name, const char* symbol, int since) {
    return library_.find(name, symbol, since);
  });
}

void Driver::initialize() {
  watch_for_forks_of_driver();
  initialized.store(true, std::memory_order_relaxed);  // a fork meanwhile is one too late
  DriverCode code = functions_.Init(0);
  const char* call = "cuInit";
  if (code == kSuccess) {
    code = functions_.DeviceGetCount(&device_count_);
    call = "cuDeviceGetCount";
    if (code == kSuccess && device_count_ == 0) code = kNoDevice;
  } else {
    initialized.store(false, std::memory_order_relaxed);
  }
  if (code == kSuccess) return;
  const Error error = status_error(functions_, code, call, "use CUDA");
  // A name that the driver does not know counts as the end of the list, or as an invalid device.
  throw code == kNoDevice || code == kInvalidDevice ? no_device(error) : error;
}

const DriverFunctions& Driver::functions() const {
  refuse_in_child();
  return functions_;
}

const DriverFunctions* Driver::functions_at_end() const noexcept {
  return in_child_of_device_user() ? nullptr : &functions_;
}

}  // namespace farandole::cuda
