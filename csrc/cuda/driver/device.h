// A device's properties as the driver reports them, and whether our kernels run on it.
#pragma once

#include <string>
#include <vector>

#include "cuda/driver/driver.h"

namespace farandole::cuda {

/// The least compute capability that kernels can be compiled for; a build may need more
/// (why_not_loaded).
inline constexpr int kOldestCapability = 70;

/// "9.0"
std::string capability_text(int capability);

struct DeviceProperties {
  int ordinal = -1;  // among those that this process sees
  int handle = -1;   // CUdevice
  std::string name;
  DeviceUuid uuid{};   // the same in every process; of an instance in MIG mode
  std::string bus_id;  // "0000:3b:00.0"
  int capability = 0;  // 90: 9.0
  size_t memory_bytes = 0;
  int multiprocessors = 0;
  bool descriptors = false;  // memory can be exported as a file descriptor
  bool by_mps = false;       // processes that share it do not take turns on it
  bool multicast = false;    // a switch joins it to others, and folds for NCCL
  bool registers_host_memory = false;
  bool instance = false;  // of a device in MIG mode

  /// "GPU-a1b2c3d4-…", as nvidia-smi shows it.
  std::string uuid_text() const;
  /// "device 0 (NVIDIA H200)"
  std::string label() const;
  /// One sentence; empty where kernels of ours may run on it.
  std::string why_unfit() const;
};

/// Throws Error(device), and Error(invalid_argument) where there is no device of this number.
DeviceProperties device_properties(const Driver& driver, int ordinal);

/// The properties of all devices that this process sees.
std::vector<DeviceProperties> all_devices(const Driver& driver);

/// The number of the device that has this address. Throws Error(invalid_argument) where none has.
int device_of(const Driver& driver, DevicePointer address);

/// Whether kernels on `from` may use memory of `to`.
bool reaches(const Driver& driver, const DeviceProperties& from, const DeviceProperties& to);

}  // namespace farandole::cuda
