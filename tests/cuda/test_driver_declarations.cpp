// Our declarations of the driver's functions against CUDA's own headers, where there are some when
// this is compiled: as many arguments, each as wide and of the same kind, from the same version on.
#include "cuda/driver/functions.h"

#include "check.h"
#include "cuda/driver/status.h"

#if __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>

namespace {

template <typename T>
constexpr bool is_struct = std::is_class_v<T> || std::is_union_v<T>;
template <typename Ours, typename Theirs>
constexpr bool alike =
    sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
    std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && is_struct<Ours> == is_struct<Theirs> &&
    std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;

/// Pointees are compared, too, except void and opaque objects.
template <typename T>
constexpr bool is_whole = [] {
  if constexpr (std::is_void_v<T>)
    return false;
  else
    return requires { sizeof(T); };
}();
template <typename Ours, typename Theirs>
constexpr bool same_argument() {
  if constexpr (!alike<Ours, Theirs>) {
    return false;
  } else if constexpr (std::is_pointer_v<Ours>) {
    using A = std::remove_pointer_t<Ours>;
    using B = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_function_v<A> || std::is_function_v<B>)
      return std::is_function_v<A> == std::is_function_v<B>;
    else if constexpr (is_whole<A> && is_whole<B>)
      return alike<A, B>;
    else
      return is_whole<A> == is_whole<B>;
  } else {
    return true;
  }
}

template <typename Ours, typename Theirs>
struct Same : std::false_type {};
template <typename... Ours, typename Result, typename... Theirs>
struct Same<int (*)(Ours...), Result (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs))
      return false;
    else
      return (same_argument<Ours, Theirs>() && ...);
  }();
};

using farandole::cuda::DriverFunctions;
#define X(name, suffix, since, arguments)                                              \
  static_assert(Same<decltype(DriverFunctions::name), PFN_cu##name##_v##since>::value, \
                "cu" #name " is declared otherwise");
FARANDOLE_CUDA_FUNCTIONS(X)
FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X

// Structs, whose members are compared by where they are.
using namespace farandole::cuda;
static_assert(offsetof(PhysicalProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(PhysicalProperties, handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(PhysicalProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(offsetof(MemoryAccess, flags) == offsetof(CUmemAccessDesc, flags));
using Write = decltype(CUstreamBatchMemOpParams::writeValue);
using Wait = decltype(CUstreamBatchMemOpParams::waitValue);
static_assert(offsetof(MemoryOperation, address) == offsetof(Write, address));
static_assert(offsetof(MemoryOperation, value) == offsetof(Write, value64));
static_assert(offsetof(MemoryOperation, flags) == offsetof(Write, flags));
static_assert(offsetof(MemoryOperation, flags) == offsetof(Wait, flags));

// Values.
static_assert(kWaitForWord == CU_STREAM_MEM_OP_WAIT_VALUE_32);
static_assert(kWriteWord == CU_STREAM_MEM_OP_WRITE_VALUE_32);
static_assert(kPinnedAllocation == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kOnDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kByDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kReadAndWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kNotCaptured == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(kMinimumGranularity == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(kHostPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(kHostPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kHostMapped == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(kHostMapped == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kWaitUntilReached == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(kEventTimed == CU_EVENT_DEFAULT && kEventUntimed == CU_EVENT_DISABLE_TIMING);
static_assert(kOrdinalOfPointer == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(kMostThreadsOfFunction == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
static_assert(kJitErrorLog == CU_JIT_ERROR_LOG_BUFFER);
static_assert(kJitErrorLogBytes == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
static_assert(kNotReady == CUDA_ERROR_NOT_READY && kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(kNotSupported == CUDA_ERROR_NOT_SUPPORTED && kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(kInvalidDevice == CUDA_ERROR_INVALID_DEVICE && kNotFound == CUDA_ERROR_NOT_FOUND);

}  // namespace
#endif

TEST(declarations_are_those_of_the_driver) {
  using namespace farandole::cuda;
  // Checks without CUDA's headers: the layouts that drivers have had since 10.2.
  CHECK_EQUAL(sizeof(PhysicalProperties), 32U);
  CHECK_EQUAL(sizeof(MemoryAccess), 12U);
  CHECK_EQUAL(sizeof(DeviceUuid), 16U);
  CHECK_EQUAL(sizeof(IpcMemoryHandle), 64U);
}
