// DLPack's C layouts, declared here so that nothing is copied in: version 0's tensor, which later
// versions kept, and version 1's table of C functions that a type offers beside __dlpack__.
#pragma once

#include <cstdint>

namespace farandole {

inline constexpr int32_t kDlHost = 1, kDlCuda = 2;  // types of devices

struct DlTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

/// Version 1's, which says whether it may be written to.
struct DlVersioned {
  struct {
    uint32_t major, minor;
  } version;
  void *owner, *release;
  uint64_t flags;  // 1: it may not
  DlTensor tensor;
};
inline constexpr uint64_t kDlReadOnly = 1;

struct DlExchange {
  struct {
    uint32_t major, minor;
  } version;
  DlExchange* older;
  void* allocate;  // functions that we do not call
  void* export_owned;
  void* import_owned;
  /// Describes `object` without owning it; -1 with a Python error. May be null.
  int (*look)(void* object, DlTensor* tensor);
  /// The stream (on CUDA a CUstream) in which this thread's work on a device is ordered; not 0: a
  /// Python error. May be null.
  int (*current_stream)(int32_t device_type, int32_t device, void** stream);
};

}  // namespace farandole
