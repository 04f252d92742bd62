#include "cuda/driver/device.h"

#include <array>
#include <cstdint>
#include <cstdio>

#include "base/error.h"
#include "cuda/driver/status.h"

namespace farandole::cuda {
namespace {

/// CU_DEVICE_ATTRIBUTE_...
enum Attribute : int {
  kMultiprocessorCount = 16,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kHostRegister = 99,
  kVirtualMemory = 102,
  kDescriptors = 103,
  kMulticast = 132,
  kByMps = 133,  // CU_DEVICE_ATTRIBUTE_MPS_ENABLED
};

/// Asks for one thing after the other about one device.
class Questions {
 public:
  Questions(const DriverFunctions& functions, int ordinal)
      : functions_(functions), tried_("look at device " + std::to_string(ordinal)) {
    check(functions.DeviceGet(&device_, ordinal), "cuDeviceGet");
  }

  int handle() const { return device_; }
  int attribute(Attribute attribute) const {
    int value = 0;
    check(functions_.DeviceGetAttribute(&value, attribute, device_), "cuDeviceGetAttribute");
    return value;
  }
  /// For an attribute that older drivers do not know.
  bool is_known_and_set(Attribute attribute) const {
    int value = 0;
    const DriverCode code = functions_.DeviceGetAttribute(&value, attribute, device_);
    if (code == kInvalidValue) return false;
    check(code, "cuDeviceGetAttribute");
    return value != 0;
  }
  std::string name() const {
    std::array<char, 256> text{};
    check(functions_.DeviceGetName(text.data(), text.size() - 1, device_), "cuDeviceGetName");
    return text.data();
  }
  std::string bus_id() const {
    std::array<char, 32> text{};
    check(functions_.DeviceGetPCIBusId(text.data(), text.size() - 1, device_),
          "cuDeviceGetPCIBusId");
    return text.data();
  }
  DeviceUuid uuid() const {
    DeviceUuid uuid{};
    check(functions_.DeviceGetUuid(&uuid, device_), "cuDeviceGetUuid");
    return uuid;
  }
  size_t memory() const {
    size_t bytes = 0;
    check(functions_.DeviceTotalMem(&bytes, device_), "cuDeviceTotalMem");
    return bytes;
  }

 private:
  void check(DriverCode code, const char* call) const {
    if (code != kSuccess) throw status_error(functions_, code, call, tried_);
  }

  const DriverFunctions& functions_;
  std::string tried_;
  int device_ = -1;
};

std::string address_text(DevicePointer address) {
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(address));
  return text.data();
}

void refuse_unknown(const Driver& driver, int ordinal) {
  if (ordinal >= 0 && ordinal < driver.device_count()) return;
  throw Error(ErrorCode::invalid_argument,
              "there is no device " + std::to_string(ordinal) + ": this process sees " +
                  std::to_string(driver.device_count()),
              {}, "name one of them; CUDA_VISIBLE_DEVICES says which there are");
}

}  // namespace

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string DeviceProperties::uuid_text() const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = instance ? "MIG" : "GPU";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const auto byte = static_cast<uint8_t>(uuid.bytes[i]);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

std::string DeviceProperties::label() const {
  return "device " + std::to_string(ordinal) + " (" + name + ")";
}

std::string DeviceProperties::why_unfit() const {
  if (capability >= kOldestCapability) return "";
  return label() + " is too old: it has compute capability " + capability_text(capability) +
         ", and the kernels need " + capability_text(kOldestCapability);
}

DeviceProperties device_properties(const Driver& driver, int ordinal) {
  const DriverFunctions& functions = driver.functions();
  refuse_unknown(driver, ordinal);
  const Questions ask(functions, ordinal);
  DeviceProperties found;
  found.handle = ask.handle();
  found.ordinal = ordinal;
  found.name = ask.name();
  found.uuid = ask.uuid();
  found.bus_id = ask.bus_id();
  found.capability = 10 * ask.attribute(kCapabilityMajor) + ask.attribute(kCapabilityMinor);
  found.memory_bytes = ask.memory();
  found.multiprocessors = ask.attribute(kMultiprocessorCount);
  found.descriptors = functions.have_virtual_memory() && ask.attribute(kVirtualMemory) != 0 &&
                      ask.attribute(kDescriptors) != 0;
  found.multicast = ask.is_known_and_set(kMulticast);
  found.by_mps = ask.is_known_and_set(kByMps);
  found.registers_host_memory = ask.attribute(kHostRegister) != 0;
  // No attribute says so; the driver appends the instance: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
  found.instance = found.name.find(" MIG ") != std::string::npos;
  return found;
}

std::vector<DeviceProperties> all_devices(const Driver& driver) {
  std::vector<DeviceProperties> all;
  for (int i = 0; i < driver.device_count(); ++i) all.push_back(device_properties(driver, i));
  return all;
}

int device_of(const Driver& driver, DevicePointer address) {
  int ordinal = -1;
  const DriverFunctions& functions = driver.functions();
  const DriverCode code = functions.PointerGetAttribute(&ordinal, kOrdinalOfPointer, address);
  if (code == kSuccess) return ordinal;
  const Error failed =
      status_error(functions, code, "cuPointerGetAttribute", "find the device that has an address");
  if (code != kInvalidValue) throw Error(failed);
  throw Error(ErrorCode::invalid_argument,
              "the CUDA driver knows no memory at " + address_text(address), failed.where(),
              "pass an array whose memory is on a device, and was not freed");
}

bool reaches(const Driver& driver, const DeviceProperties& from, const DeviceProperties& to) {
  if (from.handle == to.handle) return true;
  int can = 0;
  const DriverFunctions& functions = driver.functions();
  const DriverCode code = functions.DeviceCanAccessPeer(&can, from.handle, to.handle);
  if (code != kSuccess)
    throw status_error(functions, code, "cuDeviceCanAccessPeer",
                       "ask whether " + from.label() + " reaches " + to.label());
  return can != 0;
}

}  // namespace farandole::cuda
