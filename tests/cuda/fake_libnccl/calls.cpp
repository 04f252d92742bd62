// NCCL's functions, and what tests ask of the fake beyond them.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <sstream>

#include "base/half.h"
#include "fake_nccl.h"

using namespace farandole;
using namespace farandole::cuda;
using namespace farandole::cuda::fake_nccl;

// A definition that is not as our table of functions says does not compile.
#define FAKE_NCCL extern "C" __attribute__((visibility("default")))
#define X(name, arguments) FAKE_NCCL NcclCode nccl##name arguments;
FARANDOLE_NCCL_FUNCTIONS(X)
#undef X

namespace {

constexpr int kVersion = 22005;

struct Failure {
  std::string call;
  int nth, code;
};

struct State {
  std::mutex mutex;                    // guards the rest
  std::deque<ncclComm> communicators;  // none is freed: one that is gone is known as such
  std::vector<Failure> failures;
  std::map<std::string, size_t> calls;
  std::string misuse;
  NcclCode asynchronous = kNcclSuccess;
  int last_op = 100;
};

State& state() {
  static auto* const all = [] {
    auto* made = new State;
    const char* const wanted = std::getenv("FAKE_NCCL_FAIL");
    std::istringstream in(wanted != nullptr ? wanted : "");
    for (std::string part; std::getline(in, part, ',');) {
      const size_t number = part.find('#'), code = part.find('=');
      made->failures.push_back({part.substr(0, number), std::atoi(part.c_str() + number + 1),
                                std::atoi(part.c_str() + code + 1)});
    }
    return made;
  }();
  return *all;
}

std::atomic<bool>& held() {
  static std::atomic<bool> one{false};
  return one;
}

/// The fake driver's.
template <typename Function>
Function driver(const char* name) {
  static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function>(::dlsym(library, name));
}

ContextHandle current_context() {
  ContextHandle current = nullptr;
  driver<int (*)(ContextHandle*)>("cuCtxGetCurrent")(&current);
  return current;
}

/// The place of the current context's device: this host and the bus id.
std::string place() {
  const char* const host = std::getenv("FAKE_NCCL_HOST");
  int device = 0;
  char bus_id[32] = {};
  driver<int (*)(int*)>("cuCtxGetDevice")(&device);
  driver<int (*)(char*, int, int)>("cuDeviceGetPCIBusId")(bus_id, sizeof bus_id, device);
  return std::string(host != nullptr ? host : "") + " " + bus_id;
}

/// The code that a test wants from this call.
NcclCode count(const char* name) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  ++all.calls[name];
  for (auto it = all.failures.begin(); it != all.failures.end(); ++it)
    if (it->call == name && --it->nth == 0) {
      const int code = it->code;
      all.failures.erase(it);
      return code;
    }
  return kNcclSuccess;
}

void wait_for_worker(ncclComm& comm) {
  if (comm.worker.joinable()) comm.worker.join();
}

/// One group's work, as a stream's function gets it.
struct Launch {
  ncclComm* comm;
  std::vector<Task> tasks;
};

void run_launch(void* user) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(user));
  try {
    run(*launch->comm, launch->tasks);
  } catch (const Aborted&) {  // NOLINT: that is its end
  }
}

struct Group {
  int depth = 0;
  ncclComm* comm = nullptr;
  StreamHandle stream = nullptr;
  std::vector<Task> tasks;
};
thread_local Group group;

/// Puts it into the stream; `later`: by a thread of NCCL's.
NcclCode launch(Group&& what) {
  ncclComm& comm = *what.comm;
  auto* const work = new Launch{&comm, std::move(what.tasks)};
  const auto enqueue = [stream = what.stream, work, context = comm.context] {
    driver<int (*)(ContextHandle)>("cuCtxPushCurrent_v2")(context);
    driver<int (*)(StreamHandle, HostFunction, void*)>("cuLaunchHostFunc")(stream, run_launch,
                                                                           work);
    ContextHandle popped = nullptr;
    driver<int (*)(ContextHandle*)>("cuCtxPopCurrent_v2")(&popped);
  };
  const int late = setting("FAKE_NCCL_LATE", 0);
  if (late == 0) {
    enqueue();
    return kNcclSuccess;
  }
  comm.state = kNcclInProgress;
  wait_for_worker(comm);
  comm.worker = std::thread([&comm, enqueue, late] {
    std::this_thread::sleep_for(std::chrono::microseconds(late));
    if (!comm.aborted) enqueue();
    NcclCode busy = kNcclInProgress;
    comm.state.compare_exchange_strong(busy, kNcclSuccess);
  });
  return kNcclInProgress;
}

bool is_usable(const char* name, ncclComm* comm) {
  if (comm->gone || comm->aborted || comm->finalized) {
    blame(std::string(name) + " of a communicator that has ended");
    return false;
  }
  if (comm->state == kNcclInProgress)
    blame(std::string(name) + " while another call is in progress");
  if (current_context() != comm->context) blame(std::string(name) + " in another device's context");
  return true;
}

bool is_known(const void* address) {
  int device = 0;
  return driver<int (*)(void*, int, DevicePointer)>("cuPointerGetAttribute")(
             &device, kOrdinalOfPointer,
             static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(address))) == 0;
}

NcclCode add(const char* name, What what, const void* from, void* to, size_t n, int type, int op,
             int peer, ncclComm* comm, StreamHandle stream) {
  if (const NcclCode code = count(name); code != kNcclSuccess) return code;
  if (!is_usable(name, comm)) return 4;
  const bool reads = what != What::receive && (what != What::broadcast || peer == comm->rank);
  const bool writes = what != What::send && (what != What::reduce || peer == comm->rank);
  if (type < 0 || type > kNcclBfloat16 || peer < 0 || peer >= comm->size ||
      (op > kNcclMin && !comm->ops.contains(op)) || (reads && !is_known(from)) ||
      (writes && !is_known(to))) {
    blame(std::string(name) + " gets a wrong argument");
    return 4;
  }
  if (group.depth == 0) blame(std::string(name) + " outside of a group");  // ours never is
  group.comm = comm;
  group.stream = stream;
  const bool scales = op > kNcclMin;
  group.tasks.push_back({what, static_cast<const std::byte*>(from), static_cast<std::byte*>(to), n,
                         type, scales ? kNcclSum : op, peer, scales ? comm->ops[op] : 1});
  return kNcclSuccess;
}

double number_of(const void* scalar, int type) {
  if (type == kNcclFloat64) return *static_cast<const double*>(scalar);
  if (type == kNcclFloat32) return *static_cast<const float*>(scalar);
  const uint16_t bits = *static_cast<const uint16_t*>(scalar);
  return std::bit_cast<double>(type == kNcclFloat16 ? convert<kFloat16, kFloat64>(bits)
                                                    : convert<kBFloat16, kFloat64>(bits));
}

}  // namespace

void farandole::cuda::fake_nccl::blame(const std::string& what) {
  const std::lock_guard lock(state().mutex);
  state().misuse += what + "\n";
}

int farandole::cuda::fake_nccl::setting(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? std::atoi(value) : otherwise;
}

NcclCode ncclGetVersion(int* version) {
  *version = setting("FAKE_NCCL_VERSION", kVersion);
  return count("ncclGetVersion");
}

FAKE_NCCL const char* ncclGetLastError(NcclHandle) { return "what the fake says"; }

NcclCode ncclGetUniqueId(NcclUniqueId* id) {
  if (const NcclCode code = count("ncclGetUniqueId"); code != kNcclSuccess) return code;
  *id = make_id();
  return kNcclSuccess;
}

NcclCode ncclCommInitRankConfig(NcclHandle* made, int size, NcclUniqueId id, int rank,
                                NcclConfig* config) {
  if (const NcclCode code = count("ncclCommInitRankConfig"); code != kNcclSuccess) return code;
  if (config->magic != 0xcafebeef || config->size != 24 || config->blocking != 0 ||
      size > kMostRanks) {
    blame("a configuration that NCCL does not know, or one that blocks");
    return 4;
  }
  Table* const table = table_of(id);
  if (table == nullptr) return 2;
  ncclComm* comm = nullptr;
  {
    const std::lock_guard lock(state().mutex);
    comm = &state().communicators.emplace_back();
  }
  comm->table = table;
  comm->rank = rank;
  comm->size = size;
  comm->context = current_context();
  *made = comm;
  comm->worker = std::thread([comm, own = place()] {
    Seat& mine = comm->table->seats[comm->rank];
    own.copy(mine.place, sizeof mine.place - 1);
    mine.process = ::getpid();
    NcclCode code = kNcclSuccess;
    try {
      while (held()) nap(*comm);
      meet(*comm);
      const bool shares = setting("FAKE_NCCL_VERSION", kVersion) >= 23000 &&
                          setting("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0;
      for (int r = 0; r < comm->size; ++r)
        if (!shares && r != comm->rank && own == comm->table->seats[r].place) code = 5;
    } catch (const Aborted&) {  // NOLINT: nobody asks any more
    }
    NcclCode busy = kNcclInProgress;
    comm->state.compare_exchange_strong(busy, code);
  });
  return kNcclInProgress;
}

NcclCode ncclCommGetAsyncError(NcclHandle comm, NcclCode* code) {
  if (const NcclCode wanted = count("ncclCommGetAsyncError"); wanted != kNcclSuccess) return wanted;
  if (comm->gone || comm->aborted) blame("ncclCommGetAsyncError of a communicator that has ended");
  const std::lock_guard lock(state().mutex);
  if (state().asynchronous != kNcclSuccess) comm->state = state().asynchronous;
  *code = comm->state;
  return kNcclSuccess;
}

NcclCode ncclCommFinalize(NcclHandle comm) {
  if (const NcclCode code = count("ncclCommFinalize"); code != kNcclSuccess) return code;
  if (!is_usable("ncclCommFinalize", comm)) return 4;
  comm->finalized = true;
  comm->state = kNcclInProgress;
  wait_for_worker(*comm);
  comm->worker = std::thread([comm] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    comm->state = kNcclSuccess;
  });
  return kNcclInProgress;
}

NcclCode ncclCommDestroy(NcclHandle comm) {
  if (const NcclCode code = count("ncclCommDestroy"); code != kNcclSuccess) return code;
  if (!comm->finalized || comm->gone) blame("ncclCommDestroy of what is not finalized");
  wait_for_worker(*comm);
  comm->gone = true;
  return kNcclSuccess;
}

NcclCode ncclCommAbort(NcclHandle comm) {
  const NcclCode code = count("ncclCommAbort");
  if (comm->gone) blame("ncclCommAbort of a communicator that has ended");
  comm->aborted = true;
  wait_for_worker(*comm);
  comm->gone = true;
  return code;
}

NcclCode ncclGroupStart() {
  if (const NcclCode code = count("ncclGroupStart"); code != kNcclSuccess) return code;
  ++group.depth;
  return kNcclSuccess;
}

NcclCode ncclGroupEnd() {
  Group done;
  std::swap(done, group);
  if (done.depth != 1) blame("ncclGroupEnd of no group");
  if (const NcclCode code = count("ncclGroupEnd"); code != kNcclSuccess) return code;
  return done.tasks.empty() ? kNcclSuccess : launch(std::move(done));
}

NcclCode ncclAllReduce(const void* from, void* to, size_t n, int type, int op, NcclHandle comm,
                       StreamHandle stream) {
  return add("ncclAllReduce", What::all_reduce, from, to, n, type, op, 0, comm, stream);
}
NcclCode ncclReduceScatter(const void* from, void* to, size_t n, int type, int op, NcclHandle comm,
                           StreamHandle stream) {
  return add("ncclReduceScatter", What::reduce_scatter, from, to, n, type, op, 0, comm, stream);
}
NcclCode ncclReduce(const void* from, void* to, size_t n, int type, int op, int root,
                    NcclHandle comm, StreamHandle stream) {
  return add("ncclReduce", What::reduce, from, to, n, type, op, root, comm, stream);
}
NcclCode ncclAllGather(const void* from, void* to, size_t n, int type, NcclHandle comm,
                       StreamHandle stream) {
  return add("ncclAllGather", What::all_gather, from, to, n, type, 0, 0, comm, stream);
}
NcclCode ncclBroadcast(const void* from, void* to, size_t n, int type, int root, NcclHandle comm,
                       StreamHandle stream) {
  return add("ncclBroadcast", What::broadcast, from, to, n, type, 0, root, comm, stream);
}
NcclCode ncclSend(const void* from, size_t n, int type, int peer, NcclHandle comm,
                  StreamHandle stream) {
  return add("ncclSend", What::send, from, nullptr, n, type, 0, peer, comm, stream);
}
NcclCode ncclRecv(void* to, size_t n, int type, int peer, NcclHandle comm, StreamHandle stream) {
  return add("ncclRecv", What::receive, nullptr, to, n, type, 0, peer, comm, stream);
}

NcclCode ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, NcclHandle comm) {
  if (const NcclCode code = count("ncclRedOpCreatePreMulSum"); code != kNcclSuccess) return code;
  if (residence != kNcclScalarOfHost || !is_usable("ncclRedOpCreatePreMulSum", comm)) return 4;
  const std::lock_guard lock(state().mutex);
  *op = ++state().last_op;
  comm->ops[*op] = number_of(scalar, type);
  return kNcclSuccess;
}

NcclCode ncclRedOpDestroy(int op, NcclHandle comm) {
  if (const NcclCode code = count("ncclRedOpDestroy"); code != kNcclSuccess) return code;
  if (comm->ops.erase(op) == 0) blame("ncclRedOpDestroy of no operation");
  return kNcclSuccess;
}

// ---- what tests ask ----

FAKE_NCCL void fake_nccl_fail(const char* call, int nth, int code) {
  const std::lock_guard lock(state().mutex);
  state().failures.push_back({call, nth, code});
}

/// This rank does not come to meet the others.
FAKE_NCCL void fake_nccl_hold(int hold) { held() = hold != 0; }

/// The asynchronous error of every communicator, from now on.
FAKE_NCCL void fake_nccl_fail_later(int code) {
  const std::lock_guard lock(state().mutex);
  state().asynchronous = code;
}

FAKE_NCCL size_t fake_nccl_calls(const char* call) {
  const std::lock_guard lock(state().mutex);
  return state().calls[call];
}

/// Wrong uses, and objects that are left; empty if there are none.
FAKE_NCCL const char* fake_nccl_left() {
  static std::string text;
  const std::lock_guard lock(state().mutex);
  text = state().misuse;
  for (const ncclComm& comm : state().communicators) {
    if (!comm.gone) text += "a communicator is left\n";
    if (!comm.ops.empty() && !comm.aborted) text += "an operation is left\n";
  }
  return text.c_str();
}
