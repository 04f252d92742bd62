// Our own declarations of the functions of NCCL that we use, found at run time in the library that
// a framework ships: no header of NCCL when this is built. What each does: NVIDIA's "NCCL User
// Guide".
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "cuda/driver/functions.h"

extern "C" {
struct ncclComm;
}

namespace farandole::cuda {

using NcclCode = int;  // ncclResult_t
using NcclHandle = ncclComm*;

struct NcclUniqueId {  // ncclUniqueId
  char bytes[128];
};
/// ncclConfig_t as NCCL 2.14 has it: later versions take that for what it is.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int unused = INT_MIN;
};

/// Values of NCCL's enumerations, as far as we pass or look at them.
inline constexpr NcclCode kNcclSuccess = 0;
inline constexpr NcclCode kNcclInProgress = 7;
inline constexpr int kNcclSum = 0, kNcclProduct = 1, kNcclMax = 2, kNcclMin = 3;
inline constexpr int kNcclInt8 = 0, kNcclUint8 = 1, kNcclInt32 = 2, kNcclUint32 = 3, kNcclInt64 = 4,
                     kNcclUint64 = 5, kNcclFloat16 = 6, kNcclFloat32 = 7, kNcclFloat64 = 8,
                     kNcclBfloat16 = 9;
inline constexpr int kNcclScalarOfHost = 1;  // ncclScalarHostImmediate

/// From here on communicators need not block: only those end when a rank does.
inline constexpr int kOldestNccl = 21400;

// X(name, arguments): ncclNAME.
#define FARANDOLE_NCCL_FUNCTIONS(X)                                                  \
  X(GetVersion, (int*))                                                              \
  X(GetUniqueId, (NcclUniqueId*))                                                    \
  X(CommInitRankConfig, (NcclHandle*, int, NcclUniqueId, int, NcclConfig*))          \
  X(CommGetAsyncError, (NcclHandle, NcclCode*))                                      \
  X(CommFinalize, (NcclHandle))                                                      \
  X(CommDestroy, (NcclHandle))                                                       \
  X(CommAbort, (NcclHandle))                                                         \
  X(GroupStart, ())                                                                  \
  X(GroupEnd, ())                                                                    \
  X(AllReduce, (const void*, void*, size_t, int, int, NcclHandle, StreamHandle))     \
  X(ReduceScatter, (const void*, void*, size_t, int, int, NcclHandle, StreamHandle)) \
  X(Reduce, (const void*, void*, size_t, int, int, int, NcclHandle, StreamHandle))   \
  X(AllGather, (const void*, void*, size_t, int, NcclHandle, StreamHandle))          \
  X(Broadcast, (const void*, void*, size_t, int, int, NcclHandle, StreamHandle))     \
  X(Send, (const void*, size_t, int, int, NcclHandle, StreamHandle))                 \
  X(Recv, (void*, size_t, int, int, NcclHandle, StreamHandle))                       \
  X(RedOpCreatePreMulSum, (int*, void*, int, int, NcclHandle))                       \
  X(RedOpDestroy, (int, NcclHandle))

/// The functions, without the nccl of their names.
struct NcclFunctions {
#define X(name, arguments) NcclCode(*name) arguments = nullptr;
  FARANDOLE_NCCL_FUNCTIONS(X)
#undef X
  const char* (*GetLastError)(NcclHandle) = nullptr;
};

/// Where to look for the library, besides where the loader does.
struct NcclPlaces {
  std::string setting;  // FARANDOLE_NCCL: "auto", "off" or a file
  std::string wheel;    // where PyPI's package has it; may be empty
};

/// The library of this process, open until it ends.
struct NcclLibrary {
  NcclFunctions functions;
  int version = 0;   // 22005: 2.20.5
  std::string file;  // where it lies

  /// Throws Error(device) with one sentence.
  static NcclLibrary open(const NcclPlaces& places);
  /// Said once, before anybody asks.
  static void look_in(NcclPlaces places);
  /// The process's own, opened by the first call that succeeds.
  static const NcclLibrary& of_process();
};

/// "2.20.5" for 22005.
std::string nccl_version_text(int version);

}  // namespace farandole::cuda
