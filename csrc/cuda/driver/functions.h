// Our own declarations of the functions of CUDA's driver API that we use, found at run time in the
// driver's library: one binary for all drivers, and no header of CUDA at build time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>

extern "C" {
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUuserObject_st;
}

namespace farandole::cuda {

using DriverCode = int;                     // CUresult
using DevicePointer = unsigned long long;   // CUdeviceptr
using PhysicalHandle = unsigned long long;  // CUmemGenericAllocationHandle
using ContextHandle = CUctx_st*;
using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using ModuleHandle = CUmod_st*;
using FunctionHandle = CUfunc_st*;
using GraphHandle = CUgraph_st*;
using GraphNodeHandle = CUgraphNode_st*;
using UserObjectHandle = CUuserObject_st*;
using HostFunction = void (*)(void*);

struct DeviceUuid {  // CUuuid
  char bytes[16];
  bool operator==(const DeviceUuid&) const = default;
};
struct IpcMemoryHandle {  // CUipcMemHandle
  char bytes[64];
};
struct MemoryLocation {  // CUmemLocation
  int type, id;
};
struct PhysicalProperties {  // CUmemAllocationProp
  int type;
  int handle_types;
  MemoryLocation location;
  void* windows_only;
  struct {
    unsigned char compression, direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct MemoryAccess {  // CUmemAccessDesc
  MemoryLocation location;
  int flags;
};
struct MemoryOperation {  // CUstreamBatchMemOpParams
  int kind;
  DevicePointer address;
  uint64_t value;
  unsigned flags;
  uint64_t unused[2];
};
static_assert(sizeof(MemoryOperation) == 48);

/// Values of the driver's enumerations, as far as we pass them.
inline constexpr int kPinnedAllocation = 1;        // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kOnDevice = 1;                // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kByDescriptor = 1;            // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kReadAndWrite = 3;            // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kMinimumGranularity = 0;      // CU_MEM_ALLOC_GRANULARITY_MINIMUM
inline constexpr unsigned kIpcLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr unsigned kHostPortable = 1;       // CU_MEMHOST{ALLOC,REGISTER}_PORTABLE
inline constexpr unsigned kHostMapped = 2;         // CU_MEMHOST{ALLOC,REGISTER}_DEVICEMAP
inline constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kWaitUntilReached = 0;   // CU_STREAM_WAIT_VALUE_GEQ, modulo 2^32
inline constexpr unsigned kWaitUntilAnyBit = 2;    // CU_STREAM_WAIT_VALUE_AND
inline constexpr int kWaitForWord = 1;             // CU_STREAM_MEM_OP_WAIT_VALUE_32
inline constexpr int kWriteWord = 2;               // CU_STREAM_MEM_OP_WRITE_VALUE_32
inline constexpr int kNotCaptured = 0;             // CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int kSpoiltCapture = 2;           // CU_STREAM_CAPTURE_STATUS_INVALIDATED
inline constexpr int kRelaxedCapture = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr unsigned kNoDestructorSync = 1;   // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
inline constexpr unsigned kMoveUserObject = 1;     // CU_GRAPH_USER_OBJECT_MOVE
inline constexpr unsigned kEventTimed = 0;         // CU_EVENT_DEFAULT
inline constexpr unsigned kEventUntimed = 2;       // CU_EVENT_DISABLE_TIMING
inline constexpr int kOrdinalOfPointer = 9;        // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
inline constexpr int kMostThreadsOfFunction = 0;   // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
inline constexpr int kJitErrorLog = 5;             // CU_JIT_ERROR_LOG_BUFFER
inline constexpr int kJitErrorLogBytes = 6;        // CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES

// X(name, suffix of the symbol, since, arguments): cuNAMEsuffix, as it is declared from that
// version of CUDA on (12040: 12.4). What each does: NVIDIA's "CUDA Driver API" and our wrapper.
#define FARANDOLE_CUDA_FUNCTIONS(X)                                                        \
  X(Init, , 2000, (unsigned))                                                              \
  X(DriverGetVersion, , 2020, (int*))                                                      \
  X(GetErrorName, , 6000, (DriverCode, const char**))                                      \
  X(GetErrorString, , 6000, (DriverCode, const char**))                                    \
  X(DeviceGetCount, , 2000, (int*))                                                        \
  X(DeviceGet, , 2000, (int*, int))                                                        \
  X(DeviceGetName, , 2000, (char*, int, int))                                              \
  X(DeviceGetUuid, _v2, 11040, (DeviceUuid*, int))                                         \
  X(DeviceTotalMem, _v2, 3020, (size_t*, int))                                             \
  X(DeviceGetAttribute, , 2000, (int*, int, int))                                          \
  X(DeviceGetPCIBusId, , 4010, (char*, int, int))                                          \
  X(DeviceCanAccessPeer, , 4000, (int*, int, int))                                         \
  X(DevicePrimaryCtxRetain, , 7000, (ContextHandle*, int))                                 \
  X(DevicePrimaryCtxRelease, _v2, 11000, (int))                                            \
  X(CtxPushCurrent, _v2, 4000, (ContextHandle))                                            \
  X(CtxPopCurrent, _v2, 4000, (ContextHandle*))                                            \
  X(CtxGetStreamPriorityRange, , 5050, (int*, int*))                                       \
  X(MemAlloc, _v2, 3020, (DevicePointer*, size_t))                                         \
  X(MemFree, _v2, 3020, (DevicePointer))                                                   \
  X(MemGetInfo, _v2, 3020, (size_t*, size_t*))                                             \
  X(MemHostAlloc, , 2020, (void**, size_t, unsigned))                                      \
  X(MemFreeHost, , 2000, (void*))                                                          \
  X(MemHostRegister, _v2, 6050, (void*, size_t, unsigned))                                 \
  X(MemHostUnregister, , 4000, (void*))                                                    \
  X(MemHostGetDevicePointer, _v2, 3020, (DevicePointer*, void*, unsigned))                 \
  X(PointerGetAttribute, , 4000, (void*, int, DevicePointer))                              \
  X(MemcpyAsync, , 4000, (DevicePointer, DevicePointer, size_t, StreamHandle))             \
  X(MemsetD8Async, , 3020, (DevicePointer, unsigned char, size_t, StreamHandle))           \
  X(MemsetD32Async, , 3020, (DevicePointer, unsigned, size_t, StreamHandle))               \
  X(IpcGetMemHandle, , 4010, (IpcMemoryHandle*, DevicePointer))                            \
  X(IpcOpenMemHandle, _v2, 11000, (DevicePointer*, IpcMemoryHandle, unsigned))             \
  X(IpcCloseMemHandle, , 4010, (DevicePointer))                                            \
  X(StreamCreateWithPriority, , 5050, (StreamHandle*, unsigned, int))                      \
  X(StreamDestroy, _v2, 4000, (StreamHandle))                                              \
  X(StreamSynchronize, , 2000, (StreamHandle))                                             \
  X(StreamQuery, , 2000, (StreamHandle))                                                   \
  X(StreamIsCapturing, , 10000, (StreamHandle, int*))                                      \
  X(StreamWaitEvent, , 3020, (StreamHandle, EventHandle, unsigned))                        \
  X(StreamWriteValue32, _v2, 11070, (StreamHandle, DevicePointer, uint32_t, unsigned))     \
  X(StreamWaitValue32, _v2, 11070, (StreamHandle, DevicePointer, uint32_t, unsigned))      \
  X(LaunchHostFunc, , 10000, (StreamHandle, HostFunction, void*))                          \
  X(EventCreate, , 2000, (EventHandle*, unsigned))                                         \
  X(EventDestroy, _v2, 4000, (EventHandle))                                                \
  X(EventRecord, , 2000, (EventHandle, StreamHandle))                                      \
  X(EventQuery, , 2000, (EventHandle))                                                     \
  X(EventSynchronize, , 2000, (EventHandle))                                               \
  X(EventElapsedTime, , 2000, (float*, EventHandle, EventHandle))                          \
  X(ModuleLoadDataEx, , 2010, (ModuleHandle*, const void*, unsigned, int*, void**))        \
  X(ModuleUnload, , 2000, (ModuleHandle))                                                  \
  X(ModuleGetFunction, , 2000, (FunctionHandle*, ModuleHandle, const char*))               \
  X(FuncGetAttribute, , 2020, (int*, int, FunctionHandle))                                 \
  X(LaunchKernel, , 4000,                                                                  \
    (FunctionHandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
     StreamHandle, void**, void**))

// Null where the driver (or what stands in for one) lacks them: there is another way, or a check
// less.
#define FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)                                                      \
  X(MemAddressReserve, , 10020,                                                                   \
    (DevicePointer*, size_t, size_t, DevicePointer, unsigned long long))                          \
  X(MemAddressFree, , 10020, (DevicePointer, size_t))                                             \
  X(MemCreate, , 10020, (PhysicalHandle*, size_t, const PhysicalProperties*, unsigned long long)) \
  X(MemRelease, , 10020, (PhysicalHandle))                                                        \
  X(MemMap, , 10020, (DevicePointer, size_t, size_t, PhysicalHandle, unsigned long long))         \
  X(MemUnmap, , 10020, (DevicePointer, size_t))                                                   \
  X(MemSetAccess, , 10020, (DevicePointer, size_t, const MemoryAccess*, size_t))                  \
  X(MemExportToShareableHandle, , 10020, (void*, PhysicalHandle, int, unsigned long long))        \
  X(MemImportFromShareableHandle, , 10020, (PhysicalHandle*, void*, int))                         \
  X(MemGetAllocationGranularity, , 10020, (size_t*, const PhysicalProperties*, int))              \
  X(ThreadExchangeStreamCaptureMode, , 10010, (int*))                                             \
  X(StreamBatchMemOp, _v2, 11070, (StreamHandle, unsigned, MemoryOperation*, unsigned))           \
  X(StreamGetCaptureInfo, _v2, 11030,                                                             \
    (StreamHandle, int*, unsigned long long*, GraphHandle*, const GraphNodeHandle**, size_t*))    \
  X(UserObjectCreate, , 11030, (UserObjectHandle*, void*, HostFunction, unsigned, unsigned))      \
  X(GraphRetainUserObject, , 11030, (GraphHandle, UserObjectHandle, unsigned, unsigned))          \
  X(FuncLoad, , 12040, (FunctionHandle))                                                          \
  X(FuncGetParamInfo, , 12040, (FunctionHandle, size_t, size_t*, size_t*))

/// The functions, without the cu of their names.
struct DriverFunctions {
#define X(name, suffix, since, arguments) DriverCode(*name) arguments = nullptr;
  FARANDOLE_CUDA_FUNCTIONS(X)
  FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X

  /// Whether all of virtual memory management is there.
  bool have_virtual_memory() const;
};

/// A function by its name ("cuMemAlloc"), its symbol ("cuMemAlloc_v2") and the version whose
/// declaration is ours; null where there is none.
using FindFunction = std::function<void*(const char* name, const char* symbol, int since)>;

/// All functions; throws Error(device) with a sentence for each that is missing and not optional.
DriverFunctions bind_functions(const FindFunction& find);

/// The driver's library, open until the process ends: it has threads of its own.
class DriverLibrary {
 public:
  /// Throws Error(device) where it cannot be opened.
  explicit DriverLibrary(const std::string& file);

  /// By cuGetProcAddress, which knows the functions of a version, where there is one; else by
  /// symbol.
  void* find(const char* name, const char* symbol, int since) const;

 private:
  void* handle_;
  DriverCode (*get_address_)(const char*, void**, int, uint64_t, int*) = nullptr;  // from 12.0 on
};

/// "12.4" for 12040.
std::string version_text(int version);

}  // namespace farandole::cuda
