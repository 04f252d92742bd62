// Every call of the driver, failing with every code: nothing leaks, no answer is wrong, and the
// error says what was tried, what the driver calls it and what to do.
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/driver/completion.h"
#include "cuda/driver/event.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/driver/peer_memory.h"
#include "cuda/driver/stream.h"
#include "fake.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;

namespace {

constexpr size_t kWords = 16;
constexpr uint32_t kAnswer = 0x05050505 + 1;

/// Uses every function that there is; what comes out of it.
uint32_t use_all(const FreshDriver& fresh) {
  const auto driver = fresh.open();
  const auto context = DeviceContext::retain(driver, 0);
  reaches(*driver, context->device(), device_properties(*driver, 1));
  const auto own = allocate_device(context, kWords * 4, Sharing::none);
  CHECK_EQUAL(device_of(*driver, own->address()), 0);
  const auto shared = allocate_device(context, kWords * 4, Sharing::processes);
  MemoryExport exported = shared->share();
  std::shared_ptr<PeerMemory> peer;
  PeerMappings peers(context);
  if (exported.kind == ExportKind::descriptor) {
    exported.id.process = 1;
    peer = peers.map(exported);
  }
  const DeviceAddress& seen = peer ? static_cast<const DeviceAddress&>(*peer) : *shared;
  const PinnedMemory result(context, kWords * 4);
  alignas(4096) static std::byte pages[4096];
  const RegisteredPages registered(context, pages);

  const auto module = DeviceModule::load(context, "fake image");
  const DeviceFunction add = module->function("test_add");

  CompletionCount done(context);
  DeviceStream producer(context), reducer(context);
  DeviceEvent ready(context, Timing::on), reduced(context, Timing::on);
  const TestAdd parameters{reinterpret_cast<uint32_t*>(shared->address()), kWords, 1};
  producer.refuse_capture();
  producer.fill(own->address(), 5, kWords * 4);
  producer.copy(shared->address(), own->address(), kWords * 4);
  ready.record(producer);
  reducer.wait(ready);
  add.launch(reducer, {1, 32}, parameters);
  reducer.copy(registered.address(), seen.address(), kWords * 4);
  reducer.copy(result.address(), registered.address(), kWords * 4);
  const uint32_t number = done.mark(reducer);
  reduced.record(reducer);
  reducer.wait(result.address() + 4, 0);
  WordBatch words;
  words.write(result.address() + 8, 3);
  words.wait(result.address() + 8, 3);
  reducer.batch(words);
  reducer.call([](void*) {}, nullptr);
  reducer.idle();
  reduced.complete();
  reduced.synchronize();
  reducer.synchronize();
  producer.synchronize();
  reduced.milliseconds_since(ready);
  CHECK(done.reached(number));
  uint32_t answer = 0;
  std::memcpy(&answer, result.host(), sizeof answer);
  return answer;
}

/// Prepared as use_all() wants it; ways to run it.
void prepare(bool virtual_memory) {
  fake().configure("devices", "2");
  fake().configure("virtual_memory", virtual_memory ? "1" : "0");
}

/// Called by destructors, where nobody is there to be thrown at; cuCtxPushCurrent and
/// cuStreamSynchronize also elsewhere.
const std::set<std::string> kFreeing = {
    "cuMemFree",        "cuMemFreeHost",    "cuMemHostUnregister",       "cuMemRelease",
    "cuMemAddressFree", "cuMemUnmap",       "cuStreamDestroy",           "cuEventDestroy",
    "cuModuleUnload",   "cuCtxPushCurrent", "cuDevicePrimaryCtxRelease", "cuStreamSynchronize"};

/// Their failure is no error: a way around, another answer, or nothing to be done (a context that
/// we have pushed ourselves).
bool is_taken(const std::string& call, DriverCode code) {
  return call == "cuGetProcAddress" || call == "cuCtxPopCurrent" ||
         (call == "cuStreamWriteValue32" && code == kNotSupported) ||
         ((call == "cuStreamQuery" || call == "cuEventQuery") && code == kNotReady);
}

/// The calls that use_all() makes, and how often.
std::map<std::string, int> calls_of_all(bool virtual_memory) {
  const FreshDriver fresh;
  prepare(virtual_memory);
  CHECK_EQUAL(use_all(fresh), kAnswer);
  std::map<std::string, int> calls;
  std::istringstream log(fake().log());
  for (std::string call; std::getline(log, call);) ++calls[call];
  return calls;
}

void check_failure(const std::string& call, int nth, const StatusRow& row, bool virtual_memory) {
  const testing::Note note(call, " #", nth, ": ", row.name);
  const FreshDriver fresh;
  prepare(virtual_memory);
  const testing::Stderr said;
  fake().fail(call.c_str(), nth, row.code);
  const std::string named =
      call + " came to CUDA_ERROR_" + std::string(row.name) + " (" + std::to_string(row.code) + ")";
  bool thrown = false;
  try {
    CHECK_EQUAL(use_all(fresh), kAnswer);
  } catch (const Error& error) {
    thrown = true;
    CHECK(error.where().evidence.starts_with(named));
    const bool no_device = row.code == kNoDevice || row.code == kInvalidDevice;
    const bool of_driver = call == "cuInit" || call == "cuDeviceGetCount";
    const bool of_caller = call == "cuPointerGetAttribute" && row.code == kInvalidValue;
    CHECK(error.code() == (of_caller                ? ErrorCode::invalid_argument
                           : of_driver && no_device ? ErrorCode::device
                                                    : row.kind));
    if (!of_caller && !(of_driver && no_device)) {
      CHECK(error.verdict().starts_with("cannot "));
      CHECK(error.verdict().ends_with(": " + std::string(row.meaning)));
      CHECK_EQUAL(error.advice(), std::string(row.advice));
    }
  }
  // It is thrown, or it is said.
  const bool expected = !is_taken(call, row.code);
  const bool told = contains(said.text(), named);
  CHECK(thrown ? said.text().empty() : told == (expected && row.code != kDeinitialized));
  CHECK(thrown == expected || kFreeing.contains(call));
  if (!thrown && expected) fake().forget();  // something is left, and we said so
  if (call != "cuCtxPopCurrent") CHECK(fresh.current() == nullptr);
}

void check_failures(bool virtual_memory) {
  for (const auto& [call, times] : calls_of_all(virtual_memory)) {
    if (call == "cuCtxPopCurrent") continue;  // it cannot fail for a context that is pushed
    for (const StatusRow& row : status_rows())
      if (!testing::kSanitizer || row.code % 7 == 0) check_failure(call, 1, row, virtual_memory);
    for (int nth = 2; nth <= (testing::kThreadSanitizer ? std::min(times, 2) : times); ++nth)
      for (const DriverCode code : {kOutOfMemory, 700})
        check_failure(call, nth, *find_status(code), virtual_memory);
  }
}

}  // namespace

TEST(use_of_all_reaches_every_function) {
  std::set<std::string> reached;
  for (const bool virtual_memory : {true, false})
    for (const auto& [call, times] : calls_of_all(virtual_memory)) reached.insert(call);
  const std::set<std::string> elsewhere = {
      "cuGetErrorName",
      "cuGetErrorString",                   // of no state: not in the log
      "cuThreadExchangeStreamCaptureMode",  // likewise: of the thread alone
      "cuStreamGetCaptureInfo",             // this and the next two: in a capture
      "cuUserObjectCreate",
      "cuGraphRetainUserObject",
      "cuMemGetInfo",      // where memory is exhausted
      "cuMemsetD32Async",  // where cuStreamWriteValue32 is missing
      "cuIpcOpenMemHandle",
      "cuIpcCloseMemHandle"};  // between processes
  for (const std::string& call : elsewhere) CHECK(!reached.contains(call));
#define X(name, suffix, since, arguments)                               \
  if (!elsewhere.contains("cu" #name) && !reached.contains("cu" #name)) \
    testing::fail(__FILE__, __LINE__, "cu" #name " is a function that nobody calls");
  FARANDOLE_CUDA_FUNCTIONS(X)
  FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
}

TEST(every_call_fails_with_every_code) { check_failures(true); }
TEST(every_call_fails_with_every_code_without_virtual_memory) { check_failures(false); }
