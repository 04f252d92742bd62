#include "cuda/driver/status.h"

#include <algorithm>
#include <array>

namespace farandole::cuda {
namespace {

constexpr auto kReport = "report this with the trace";
constexpr auto kRestart = "restart the ranks: CUDA gives a process no second context";
constexpr auto kFindKernel =
    "find the kernel with compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1; then restart the "
    "ranks";
constexpr auto kDriverLog =
    "look for lines of NVRM in the kernel's log (dmesg), then restart the ranks";
constexpr auto kRebuild = "install a farandole built for this device, or a newer driver";
constexpr auto kMps = "look at the log of the MPS server, or run without MPS";

constexpr auto kRows = std::to_array<StatusRow>({
    {1, "INVALID_VALUE", ErrorCode::internal, false, "the driver refuses an argument", kReport},
    {2, "OUT_OF_MEMORY", ErrorCode::resource, false, "memory is exhausted",
     "free memory of the device (other processes use it, too), or use smaller buckets"},
    {3, "NOT_INITIALIZED", ErrorCode::internal, true, "the driver is not initialized here",
     kReport},
    {4, "DEINITIALIZED", ErrorCode::device, true, "the driver has ended, as the process does",
     "call shutdown() before the program ends"},
    {34, "STUB_LIBRARY", ErrorCode::device, true,
     "the library is the stub that programs are linked with, not the driver",
     "remove the toolkit's folder lib64/stubs from LD_LIBRARY_PATH"},
    {36, "CALL_REQUIRES_NEWER_DRIVER", ErrorCode::device, false, "the driver is too old for it",
     "install a newer driver"},
    {46, "DEVICE_UNAVAILABLE", ErrorCode::device, false,
     "another process has the device for itself, or the device does not answer",
     "end the other process, or set the compute mode to default (nvidia-smi -c DEFAULT)"},
    {100, "NO_DEVICE", ErrorCode::device, true, "the driver finds no device",
     "look at what nvidia-smi shows"},
    {101, "INVALID_DEVICE", ErrorCode::device, false, "there is no such device",
     "look at CUDA_VISIBLE_DEVICES and at what nvidia-smi shows"},
    {102, "DEVICE_NOT_LICENSED", ErrorCode::device, false, "the virtual GPU has no license",
     "ask whoever runs this virtual machine"},
    {200, "INVALID_IMAGE", ErrorCode::device, false, "the kernels cannot be read by this driver",
     kRebuild},
    {201, "INVALID_CONTEXT", ErrorCode::device, true, "the device's context is gone",
     "do not reset the device (cudaDeviceReset) between init() and shutdown()"},
    {205, "MAP_FAILED", ErrorCode::device, false, "the driver cannot map the memory", kDriverLog},
    {206, "UNMAP_FAILED", ErrorCode::device, false, "the driver cannot unmap the memory",
     kDriverLog},
    {208, "ALREADY_MAPPED", ErrorCode::internal, false, "the memory is mapped already", kReport},
    {209, "NO_BINARY_FOR_GPU", ErrorCode::device, false,
     "the kernels are not built for this device", kRebuild},
    {214, "ECC_UNCORRECTABLE", ErrorCode::device, true, "the device's memory has lost bits",
     kDriverLog},
    {217, "PEER_ACCESS_UNSUPPORTED", ErrorCode::device, false,
     "the two devices cannot reach each other's memory", "let the ranks use host memory"},
    {218, "INVALID_PTX", ErrorCode::device, false, "the driver cannot compile the kernels",
     kRebuild},
    {220, "NVLINK_UNCORRECTABLE", ErrorCode::device, true, "the link between devices has lost bits",
     kDriverLog},
    {221, "JIT_COMPILER_NOT_FOUND", ErrorCode::device, false,
     "the driver lacks its compiler, and the kernels are not built for this device", kRebuild},
    {222, "UNSUPPORTED_PTX_VERSION", ErrorCode::device, false,
     "the kernels are too new for this driver, and not built for this device", kRebuild},
    {223, "JIT_COMPILATION_DISABLED", ErrorCode::device, false,
     "the kernels are not built for this device, and the driver may not compile them",
     "unset CUDA_DISABLE_PTX_JIT, or install a farandole built for this device"},
    {226, "CONTAINED", ErrorCode::device, true,
     "the device's memory had a fault, which was contained", kRestart},
    {300, "INVALID_SOURCE", ErrorCode::device, false, "the kernels cannot be read by this driver",
     kRebuild},
    {304, "OPERATING_SYSTEM", ErrorCode::resource, false, "the operating system refuses",
     "raise the limits of open files (ulimit -n) and of locked memory (ulimit -l)"},
    {400, "INVALID_HANDLE", ErrorCode::internal, false, "the driver does not know the object",
     kReport},
    {401, "ILLEGAL_STATE", ErrorCode::internal, false, "the object is not in a state for it",
     kReport},
    {500, "NOT_FOUND", ErrorCode::internal, false, "there is nothing of that name", kReport},
    {600, "NOT_READY", ErrorCode::internal, false, "it has not come to its end", kReport},
    {700, "ILLEGAL_ADDRESS", ErrorCode::device, true,
     "a kernel of this process used an address that is not its own", kFindKernel},
    {701, "LAUNCH_OUT_OF_RESOURCES", ErrorCode::internal, false,
     "a block of the kernel needs more than the device has", kReport},
    {702, "LAUNCH_TIMEOUT", ErrorCode::device, true,
     "a kernel ran for longer than a device with a display may",
     "use a device without a display; then restart the ranks"},
    {704, "PEER_ACCESS_ALREADY_ENABLED", ErrorCode::internal, false,
     "the device reaches the other one already", kReport},
    {709, "CONTEXT_IS_DESTROYED", ErrorCode::device, true, "the device's context is gone",
     "do not reset the device (cudaDeviceReset) between init() and shutdown()"},
    {710, "ASSERT", ErrorCode::device, true, "a kernel of this process ended at an assert",
     "look for its line in the program's output; then restart the ranks"},
    {711, "TOO_MANY_PEERS", ErrorCode::device, false,
     "the device can reach no more devices than it does", "let the ranks use host memory"},
    {712, "HOST_MEMORY_ALREADY_REGISTERED", ErrorCode::internal, false,
     "the host's memory is registered already", kReport},
    {713, "HOST_MEMORY_NOT_REGISTERED", ErrorCode::internal, false,
     "the host's memory is not registered", kReport},
    {714, "HARDWARE_STACK_ERROR", ErrorCode::device, true,
     "a kernel of this process has overrun its stack", kFindKernel},
    {715, "ILLEGAL_INSTRUCTION", ErrorCode::device, true,
     "a kernel of this process met an instruction that the device does not know", kFindKernel},
    {716, "MISALIGNED_ADDRESS", ErrorCode::device, true,
     "a kernel of this process used an address that is not aligned", kFindKernel},
    {717, "INVALID_ADDRESS_SPACE", ErrorCode::device, true,
     "a kernel of this process used an address of another kind of memory", kFindKernel},
    {718, "INVALID_PC", ErrorCode::device, true, "a kernel of this process went astray",
     kFindKernel},
    {719, "LAUNCH_FAILED", ErrorCode::device, true, "a kernel of this process failed", kFindKernel},
    {721, "TENSOR_MEMORY_LEAK", ErrorCode::device, true,
     "a kernel of this process left tensor memory behind", kFindKernel},
    {800, "NOT_PERMITTED", ErrorCode::device, false, "it is not permitted",
     "do not capture a graph meanwhile; in a container, allow it to share memory of the device"},
    {801, "NOT_SUPPORTED", ErrorCode::device, false, "this device or this driver cannot do it",
     "let the ranks use host memory"},
    {802, "SYSTEM_NOT_READY", ErrorCode::device, true,
     "the machine is not ready: a service of the driver does not run",
     "start nvidia-fabricmanager, where devices are joined by NVSwitch"},
    {803, "SYSTEM_DRIVER_MISMATCH", ErrorCode::device, true,
     "the driver's library and its kernel module are of different versions",
     "restart the machine, or give the container the library of the machine's driver"},
    {804, "COMPAT_NOT_SUPPORTED_ON_DEVICE", ErrorCode::device, true,
     "the library is one of forward compatibility, which this device does not allow",
     "remove the folder compat from LD_LIBRARY_PATH"},
    {805, "MPS_CONNECTION_FAILED", ErrorCode::device, true, "the MPS server cannot be reached",
     kMps},
    {806, "MPS_RPC_FAILURE", ErrorCode::device, true, "the MPS server does not answer", kMps},
    {807, "MPS_SERVER_NOT_READY", ErrorCode::device, false, "the MPS server is not ready", kMps},
    {808, "MPS_MAX_CLIENTS_REACHED", ErrorCode::device, false, "the MPS server has all its clients",
     kMps},
    {809, "MPS_MAX_CONNECTIONS_REACHED", ErrorCode::device, false,
     "the MPS server has all its connections", kMps},
    {810, "MPS_CLIENT_TERMINATED", ErrorCode::device, true, "the MPS server has ended this process",
     kMps},
    {900, "STREAM_CAPTURE_UNSUPPORTED", ErrorCode::invalid_argument, false,
     "a graph is being captured, which cannot contain it", "do it before the capture begins"},
    {901, "STREAM_CAPTURE_INVALIDATED", ErrorCode::invalid_argument, false,
     "an earlier error has ended the graph's capture", "look at the error before this one"},
    {905, "STREAM_CAPTURE_ISOLATION", ErrorCode::invalid_argument, false,
     "it would join a stream that is being captured with one that is not",
     "let both be captured, or neither"},
    {906, "STREAM_CAPTURE_IMPLICIT", ErrorCode::invalid_argument, false,
     "it would wait for the default stream while another one is being captured",
     "do not use the default stream meanwhile"},
    {909, "TIMEOUT", ErrorCode::device, false, "the device did not answer in time", kDriverLog},
    {911, "EXTERNAL_DEVICE", ErrorCode::device, true, "a device beside the GPU has failed",
     kDriverLog},
    {999, "UNKNOWN", ErrorCode::device, true, "the driver does not say why",
     "load the module nvidia-uvm (nvidia-modprobe -u), and look for lines of NVRM in dmesg"},
});

std::string text_of(DriverCode (*ask)(DriverCode, const char**), DriverCode code) {
  const char* text = nullptr;
  return ask != nullptr && ask(code, &text) == kSuccess && text != nullptr ? text : "";
}

/// "CUDA_ERROR_OUT_OF_MEMORY (2), out of memory": the driver's words, of which newer ones know
/// more.
std::string named(const DriverFunctions& functions, DriverCode code, const StatusRow* known) {
  std::string name = text_of(functions.GetErrorName, code);
  if (name.empty()) name = known != nullptr ? "CUDA_ERROR_" + std::string(known->name) : "an error";
  name += " (" + std::to_string(code) + ")";
  const std::string meaning = text_of(functions.GetErrorString, code);
  return meaning.empty() ? name : name + ", " + meaning;
}

}  // namespace

std::span<const StatusRow> status_rows() { return kRows; }

const StatusRow* find_status(DriverCode code) {
  const auto found = std::ranges::lower_bound(kRows, code, {}, &StatusRow::code);
  return found != kRows.end() && found->code == code ? &*found : nullptr;
}

bool is_lasting(DriverCode code) {
  const StatusRow* const known = find_status(code);
  return known != nullptr && known->lasting;
}

Error status_error(const DriverFunctions& functions, DriverCode code, std::string_view call,
                   std::string_view tried, std::string_view said) {
  const StatusRow* const known = find_status(code);
  Context where;
  where.evidence = std::string(call) + " came to " + named(functions, code, known);
  if (!said.empty()) where.evidence += "; " + std::string(said);
  const std::string meaning(known != nullptr ? known->meaning : "the driver says no");
  return {known != nullptr ? known->kind : ErrorCode::device,
          "cannot " + std::string(tried) + ": " + meaning, where,
          std::string(known != nullptr ? known->advice : kDriverLog)};
}

}  // namespace farandole::cuda
