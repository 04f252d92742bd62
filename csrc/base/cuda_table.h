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

/// A device's copies: two streams of ours, one to the host and one from it. Any thread.
struct CudaQueue;
/// Pages of the host that a device reads and writes.
struct CudaPages;

enum CudaWay : int32_t { kToHost = 0, kToDevice = 1 };

/// Each function may open and initialize the driver. A result of 0: it failed.
struct CudaTable {
  uint32_t version;
  uint32_t bytes;
  int32_t has_kernels;                              // 0: built without nvcc
  int32_t (*driver_version)(CudaFailure* failure);  // 12040: CUDA 12.4
  int32_t (*device_count)(CudaFailure* failure);
  int32_t (*device)(int32_t ordinal, CudaDevice* device, CudaFailure* failure);

  /// Which device has this address.
  int32_t (*device_of)(uint64_t address, int32_t* ordinal, CudaFailure* failure);
  /// `doorbell`: an event descriptor, open until the queue is closed, that is rung when copies to
  /// the host come to a mark.
  CudaQueue* (*open_queue)(int32_t ordinal, int32_t doorbell, CudaFailure* failure);
  /// Waits for its copies.
  void (*close_queue)(CudaQueue* queue);
  /// The stream of copies to the host, for whoever lets it wait for an array's owner (a CUstream).
  uint64_t (*stream_to_host)(const CudaQueue* queue);
  /// Whole pages, which stay mapped for as long.
  CudaPages* (*register_pages)(CudaQueue* queue, void* pages, uint64_t bytes, CudaFailure* failure);
  void (*release_pages)(CudaPages* pages);
  /// `offset`: bytes from the begin of the pages.
  int32_t (*copy_to_host)(CudaQueue* queue, CudaPages* to, uint64_t offset, uint64_t from,
                          uint64_t bytes, CudaFailure* failure);
  int32_t (*copy_to_device)(CudaQueue* queue, uint64_t to, CudaPages* from, uint64_t offset,
                            uint64_t bytes, CudaFailure* failure);
  /// A number that is reached when all that now is in this way's stream is done.
  int32_t (*mark)(CudaQueue* queue, CudaWay way, uint32_t* number, CudaFailure* failure);
  /// 1: it is. Asks the driver nothing.
  int32_t (*reached)(const CudaQueue* queue, CudaWay way, uint32_t number);
  /// Fails where the context is lost, and no mark will be reached any more.
  int32_t (*look_for_loss)(CudaQueue* queue, CudaFailure* failure);
  /// Copies to the host wait for what is in `stream` (a CUstream) now.
  int32_t (*follow)(CudaQueue* queue, uint64_t stream, CudaFailure* failure);
  /// What follows in `stream` waits for the copies to the device up to now.
  int32_t (*precede)(CudaQueue* queue, uint64_t stream, CudaFailure* failure);
  /// The host waits for all copies of this way.
  int32_t (*synchronize)(CudaQueue* queue, CudaWay way, CudaFailure* failure);
};

}  // extern "C"

inline constexpr uint32_t kCudaTableVersion = 3;

}  // namespace farandole
