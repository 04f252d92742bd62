#include "cuda/nccl/communicator.h"

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/half.h"
#include "base/log.h"
#include "base/quiet_thread.h"
#include "base/reduce_op.h"

namespace farandole::cuda {
namespace {

constexpr auto kFlushPatience = std::chrono::seconds(5);
constexpr auto kAbortPatience = std::chrono::seconds(10);  // it waits for kernels to see a flag
constexpr auto kBetweenLooks = std::chrono::microseconds(200);

struct CodeRow {
  NcclCode code;
  const char* name;
  const char* sentence;
};
constexpr auto kCodes = std::to_array<CodeRow>({
    {1, "ncclUnhandledCudaError", "a call of CUDA failed"},
    {2, "ncclSystemError", "a call of the system failed"},
    {3, "ncclInternalError", "it is in a state that it did not expect"},
    {4, "ncclInvalidArgument", "it refuses an argument"},
    {5, "ncclInvalidUsage", "it refuses how it is used"},
    {6, "ncclRemoteError", "it has lost another rank, or the network"},
});

constexpr CodeRow row_of(NcclCode code) {
  for (const CodeRow& row : kCodes)
    if (row.code == code) return row;
  return {code, "an unknown code", "it failed"};
}

/// NCCL's types by ours; -1: it has none.
constexpr int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return kNcclFloat16;
    case DType::bfloat16:
      return kNcclBfloat16;
    case DType::float32:
      return kNcclFloat32;
    case DType::float64:
      return kNcclFloat64;
    case DType::int8:
      return kNcclInt8;
    case DType::uint8:
      return kNcclUint8;
    case DType::int32:
      return kNcclInt32;
    case DType::uint32:
      return kNcclUint32;
    case DType::int64:
      return kNcclInt64;
    case DType::uint64:
      return kNcclUint64;
    default:
      return -1;
  }
}

/// `factor` as an element of the type, in the first of its bytes.
std::array<std::byte, 8> scalar_of(double factor, DType dtype) {
  std::array<std::byte, 8> bytes{};
  const auto put = [&](const auto value) { std::memcpy(bytes.data(), &value, sizeof value); };
  const uint64_t bits = std::bit_cast<uint64_t>(factor);
  if (dtype == DType::float64) put(factor);
  if (dtype == DType::float32) put(static_cast<float>(factor));
  if (dtype == DType::float16) put(static_cast<uint16_t>(convert<kFloat64, kFloat16>(bits)));
  if (dtype == DType::bfloat16) put(static_cast<uint16_t>(convert<kFloat64, kBFloat16>(bits)));
  return bytes;
}

const void* source(uint64_t address) {
  return std::bit_cast<const void*>(static_cast<uintptr_t>(address));
}
void* destination(uint64_t address) {
  return std::bit_cast<void*>(static_cast<uintptr_t>(address));
}

}  // namespace

CudaNcclId NcclCommunicator::make_id() {
  const NcclLibrary& library = NcclLibrary::of_process();
  NcclUniqueId id{};
  if (const NcclCode code = library.functions.GetUniqueId(&id); code != kNcclSuccess)
    throw Error(ErrorCode::device,
                std::string("NCCL makes no id for ranks to meet: ") + row_of(code).sentence);
  return std::bit_cast<CudaNcclId>(id);
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<const DeviceContext> context,
                                   const CudaNcclId& id, int rank, int size)
    : context_(std::move(context)), library_(NcclLibrary::of_process()) {
  const DeviceContext::Use use(*context_);
  NcclConfig config;
  check(library_.functions.CommInitRankConfig(&handle_, size, std::bit_cast<NcclUniqueId>(id), rank,
                                              &config),
        asked_);
}

NcclCommunicator::~NcclCommunicator() {
  if (context_->driver().functions_at_end() == nullptr) return;  // forked, or the process ends
  if (!aborted_ && (failed_ || !settled_ || !flush())) abort();
  wait_for_abort();
}

Error NcclCommunicator::error_of(NcclCode code, const char* call) const {
  const CodeRow row = row_of(code);
  Context where;
  where.evidence = std::string(call) + ": " + row.name + " (" + std::to_string(code) + "), NCCL " +
                   nccl_version_text(library_.version);
  if (library_.functions.GetLastError != nullptr)
    if (const char* const said = library_.functions.GetLastError(handle_); said && *said != 0)
      where.evidence += std::string(": ") + said;
  return {ErrorCode::device,
          std::string(call) + " failed on " + context_->device().label() + ": " + row.sentence,
          where, "NCCL_DEBUG=WARN lets NCCL say more; FARANDOLE_NCCL=off goes without it"};
}

void NcclCommunicator::check(NcclCode code, const char* call) {
  if (code == kNcclSuccess || code == kNcclInProgress) return;
  failed_ = true;
  throw error_of(code, call);
}

bool NcclCommunicator::ready() {
  if (aborted_) throw Error(ErrorCode::aborted, "NCCL was given up: the ranks have failed");
  const DeviceContext::Use use(*context_);
  NcclCode state = kNcclSuccess;
  check(library_.functions.CommGetAsyncError(handle_, &state), "ncclCommGetAsyncError");
  check(state, asked_);
  if (state == kNcclInProgress) return false;
  settled_ = true;
  if (op_) {
    asked_ = "ncclRedOpDestroy";
    check(library_.functions.RedOpDestroy(*std::exchange(op_, std::nullopt), handle_), asked_);
  }
  return true;
}

void NcclCommunicator::look_for_failure() {
  if (failed_ || aborted_) return;
  const DeviceContext::Use use(*context_);
  NcclCode state = kNcclSuccess;
  check(library_.functions.CommGetAsyncError(handle_, &state), "ncclCommGetAsyncError");
  check(state, asked_);
}

// ---- operations ----

int NcclCommunicator::op_of(const NcclPlan& plan, int dtype) {
  if (plan.op == ReduceOp::min) return kNcclMin;
  if (plan.op == ReduceOp::max) return kNcclMax;
  if (plan.op == ReduceOp::product) return kNcclProduct;
  if (plan.op != ReduceOp::sum) throw Error(ErrorCode::internal, "NCCL has no such operation");
  if (plan.factor == 1) return kNcclSum;
  auto scalar = scalar_of(plan.factor, plan.dtype);
  int made = 0;
  check(library_.functions.RedOpCreatePreMulSum(&made, scalar.data(), dtype, kNcclScalarOfHost,
                                                handle_),
        "ncclRedOpCreatePreMulSum");
  op_ = made;
  return made;
}

void NcclCommunicator::run(const StreamRef& stream, const NcclPlan& plan) {
  const DeviceContext::Use use(*context_);
  settled_ = false;
  const int type = nccl_type(plan.dtype);
  if (type < 0) throw Error(ErrorCode::internal, "NCCL has no such type");
  const int op = op_of(plan, type);
  check(library_.functions.GroupStart(), "ncclGroupStart");
  try {
    for (const CudaNcclCall& call : plan.calls) start(stream, call, type, op);
  } catch (const Error&) {
    library_.functions.GroupEnd();  // or the thread's next call would belong to the group
    throw;
  }
  check(library_.functions.GroupEnd(), "ncclGroupEnd");
}

void NcclCommunicator::start(const StreamRef& stream, const CudaNcclCall& call, int type, int op) {
  const NcclFunctions& f = library_.functions;
  const StreamHandle in = stream.handle();
  const void* const from = source(call.input);
  void* const to = destination(call.output);
  const auto n = static_cast<size_t>(call.count);
  const auto ask = [&](const char* name, const auto& function) {
    asked_ = name;
    check(function(), name);
  };
  switch (call.what) {
    case kNcclAllReduce:
      return ask("ncclAllReduce", [&] { return f.AllReduce(from, to, n, type, op, handle_, in); });
    case kNcclReduceScatter:
      return ask("ncclReduceScatter",
                 [&] { return f.ReduceScatter(from, to, n, type, op, handle_, in); });
    case kNcclReduce:
      return ask("ncclReduce",
                 [&] { return f.Reduce(from, to, n, type, op, call.peer, handle_, in); });
    case kNcclAllGather:
      return ask("ncclAllGather", [&] { return f.AllGather(from, to, n, type, handle_, in); });
    case kNcclBroadcast:
      return ask("ncclBroadcast",
                 [&] { return f.Broadcast(from, to, n, type, call.peer, handle_, in); });
    case kNcclSend:
      return ask("ncclSend", [&] { return f.Send(from, n, type, call.peer, handle_, in); });
    case kNcclReceive:
      return ask("ncclRecv", [&] { return f.Recv(to, n, type, call.peer, handle_, in); });
  }
}

// ---- the end ----

/// Whether NCCL has nothing under way any more, and has freed the communicator.
bool NcclCommunicator::flush() const {
  if (handle_ == nullptr) return true;
  try {
    const DeviceContext::Use use(*context_);
    NcclCode state = library_.functions.CommFinalize(handle_);
    const TimePoint until = now() + kFlushPatience;
    while (state == kNcclInProgress && now() < until) {
      std::this_thread::sleep_for(kBetweenLooks);
      if (library_.functions.CommGetAsyncError(handle_, &state) != kNcclSuccess) return false;
    }
    return state == kNcclSuccess && library_.functions.CommDestroy(handle_) == kNcclSuccess;
  } catch (const Error&) {  // NOLINT: the context is lost
    return false;
  }
}

void NcclCommunicator::abort() noexcept {
  if (handle_ == nullptr || std::exchange(aborted_, true)) return;
  try {
    ending_ = std::make_shared<Ending>();
    aborting_ =
        start_quiet_thread("nccl-abort", [context = context_, abort = library_.functions.CommAbort,
                                          handle = handle_, ending = ending_] {
          context->at_end("ncclCommAbort", [&](const DriverFunctions&) {
            abort(handle);  // its code says nothing that could still be done
            return kSuccess;
          });
          ending->done.store(true, std::memory_order_release);
        });
  } catch (const std::exception& error) {
    log(LogLevel::error, std::string("NCCL cannot be given up: ") + error.what());
    ending_.reset();
  }
}

void NcclCommunicator::wait_for_abort() noexcept {
  if (!aborting_.joinable()) return;
  for (const TimePoint until = now() + kAbortPatience;
       !ending_->done.load(std::memory_order_acquire);) {
    if (now() >= until) {
      log(LogLevel::error, "ncclCommAbort does not return; its thread is left behind");
      return aborting_.detach();
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  aborting_.join();
}

}  // namespace farandole::cuda
