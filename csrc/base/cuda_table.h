// The table of C functions that the library for CUDA (_cuda.so) hands out when it is loaded, and
// nothing else: no symbol looked up in another library of ours, no C++ type across the border. The
// other way round from base/plugin.h, where the engine hands out the table.
#pragma once

#include <cstdint>

namespace farandole {

extern "C" {

/// Texts end with zero, cut where they are longer.
struct CudaFailure {
  int32_t kind;  // 1 + an ErrorCode
  char verdict[512];
  char evidence[1024];
  char advice[512];
};

/// What is told of a device.
struct CudaDevice {
  int32_t capability;  // 90: 9.0
  int32_t multiprocessors;
  uint64_t memory_bytes;
  int32_t instance;     // of a device in MIG mode
  int32_t descriptors;  // its memory can be exported as a file descriptor
  char name[256];
  char uuid[64];
  char bus_id[32];
  char unfit[512];  // why our kernels do not run on it; empty where they do
};

/// Each function may open and initialize the driver. A result of 0: it failed.
struct CudaTable {
  uint32_t version;
  uint32_t bytes;
  int32_t has_kernels;                              // 0: built without nvcc
  int32_t (*driver_version)(CudaFailure* failure);  // 12040: CUDA 12.4
  int32_t (*device_count)(CudaFailure* failure);
  int32_t (*device)(int32_t ordinal, CudaDevice* device, CudaFailure* failure);
};

}  // extern "C"

inline constexpr uint32_t kCudaTableVersion = 1;

}  // namespace farandole
