// Everything the fake driver knows, under one mutex.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver/functions.h"
#include "cuda/driver/status.h"
#include "executor.h"

struct CUgraph_st;

// Handles are addresses of these. None is freed before the process ends, so that a handle of
// something that is gone is known as such.
struct CUctx_st {
  int device = 0;
  int retained = 0;
  int lost = 0;  // the code that all calls come to
};
/// One record of an event. A wait keeps the record that was the last one at its call: a later one
/// does not release it.
struct EventRecord {
  bool complete = false;
  double time = 0;  // seconds, once it is complete
};
struct CUevent_st {
  CUctx_st* context = nullptr;
  bool alive = true, timed = false;
  std::shared_ptr<EventRecord> last;  // null: it was never recorded
  CUgraph_st* captured = nullptr;     // recorded last in a stream that is captured into it

  bool is_complete() const { return last == nullptr || last->complete; }
};
struct CUfunc_st {
  const farandole::cuda::Kernel* kernel = nullptr;
  CUmod_st* module = nullptr;
};
struct CUmod_st {
  CUctx_st* context = nullptr;
  bool alive = true;
  std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
};

namespace farandole::cuda::fake {

enum class RegionKind { allocated, opened, mapped, pinned, registered };

/// A stretch of addresses that may be used.
struct Region {
  RegionKind kind = RegionKind::allocated;
  CUctx_st* context = nullptr;
  size_t bytes = 0;
  int descriptor = -1;
  PhysicalHandle physical = 0;  // mapped
  int uses = 0;                 // work in streams
  int opened = 1;               // opened: how often
  bool accessible = true;
  std::string origin = {};   // opened: which
  bool portable = true;      // registered: other contexts may have it, too
  bool drops_words = false;  // that streams write there
};

/// Memory of a device.
struct Physical {
  CUctx_st* context = nullptr;
  size_t bytes = 0;
  int descriptor = -1;
  int mappings = 0;
  bool released = false, exportable = false;
};

/// A piece of work in a stream.
struct Work {
  std::function<int()> run;      // without the mutex
  std::function<void()> finish;  // with it, in one turn with the end of the work
  std::vector<DevicePointer> uses;
};

/// The same as part of a graph.
struct Node {
  std::string call;
  std::function<int()> run;
  std::vector<std::pair<DevicePointer, size_t>> ranges;
};

}  // namespace farandole::cuda::fake

struct CUstream_st {
  CUctx_st* context = nullptr;
  unsigned flags = 0;
  bool alive = true, closing = false, running = false;
  std::deque<farandole::cuda::fake::Work> queue;
  std::thread thread;
  CUgraph_st* capturing = nullptr;
};
/// Nodes run one after the other: what is captured is one stream.
struct CUgraph_st {
  CUctx_st* context = nullptr;
  int mode = 0;            // of its capture
  std::thread::id thread;  // that captures
  bool spoilt = false;
  std::vector<farandole::cuda::fake::Node> nodes;
  std::vector<CUuserObject_st*> objects;  // that it keeps
};
struct CUuserObject_st {
  std::function<void()> destroy;
};

namespace farandole::cuda::fake {

struct Config {
  int devices = 1, version = 99000, capability = 90, multiprocessors = 4;
  size_t memory = size_t{1} << 30;
  std::string name = "Fake GPU", lacks, drops;
  bool virtual_memory = true, host_register = true, peers = true, deinitialized = false;
  bool memory_operations = true, multicast = false, mps = true;
  size_t stream_room = 1020;
  uint64_t jitter = 0;
};

struct Failure {
  std::string call;
  int nth;
  int code;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;

  Config config;
  std::vector<Failure> failures;
  std::vector<const char*> log;
  std::vector<std::string> misuse;
  std::map<std::string, std::pair<size_t, unsigned>> launches;  // times, and blocks of the last
  bool initialized = false, held = false;
  std::vector<int> visible;  // devices

  std::map<int, CUctx_st*> primary;  // by device
  std::map<DevicePointer, Region> regions;
  std::map<DevicePointer, size_t> reserved, gone;
  std::map<PhysicalHandle, Physical> physicals;
  PhysicalHandle last_physical = 0;
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::set<CUmod_st*> modules;
  std::set<CUgraph_st*> captures;  // under way
  std::map<CUctx_st*, CUstream_st*> default_streams;
  std::vector<std::shared_ptr<void>> handles;  // all that ever were
  std::vector<CUstream_st*> ending;            // destroyed; their threads are to be joined

  template <typename Handle>
  Handle* make() {
    auto made = std::make_shared<Handle>();
    handles.push_back(made);
    return made.get();
  }
  void blame(const std::string& what) { misuse.push_back(what); }
  /// Null where nothing, or not all of it, may be used; blames the use of memory that is gone.
  Region* region_of(const char* call, DevicePointer address, size_t bytes);
  /// Objects that are alive in a context, or in all (null).
  std::string alive_in(const CUctx_st* context) const;
  size_t used_memory() const;
};
State& state();

/// Contexts of this thread, the current one last.
std::vector<CUctx_st*>& current_contexts();
/// This thread runs a host function.
bool& in_host_function();

std::map<std::string, std::string> settings_of_environment();
void configure(State& state, const std::string& name, const std::string& value);

enum class Needs { nothing, driver, context };
using Lock = std::unique_lock<std::mutex>;

/// The driver of a forked child does not work; in_forked_child() counts its calls.
bool is_forked_child();
bool in_forked_child();

/// The beginning of every call; a code other than kSuccess ends the call.
int begin(State& state, const char* name, Needs needs);

/// One call: body(state, lock, context).
template <typename Body>
int call(const char* name, Needs needs, const Body& body) {
  State& all = state();
  if (in_forked_child()) return 3;
  Lock lock(all.mutex);
  if (const int code = begin(all, name, needs); code != kSuccess) return code;
  CUctx_st* const context = current_contexts().empty() ? nullptr : current_contexts().back();
  return body(all, lock, context);
}

// memory.cpp
/// All that a context's end takes with it.
void free_all(State& state, const CUctx_st* context);

// streams.cpp
/// Puts work into a stream; `ranges`: what it uses.
int enqueue(State& state, const char* call, CUctx_st* context, CUstream_st* stream,
            std::function<int()> run,
            const std::vector<std::pair<DevicePointer, size_t>>& ranges = {},
            std::function<void()> finish = nullptr);
void end_streams(Lock& lock, CUctx_st* context);

/// Memory of "devices" is the process's own.
inline void* host(DevicePointer address) { return reinterpret_cast<void*>(address); }

// graphs.cpp
/// Adds to the graph that the stream is being captured into.
int capture(const char* call, CUgraph_st* graph, std::function<int()> run,
            const std::vector<std::pair<DevicePointer, size_t>>& ranges);
int spoilt(CUgraph_st& graph, int code = 900);
/// The code of a call that would spoil a capture, which it then has done; kSuccess: it does not.
int spoil(State& state, const std::string& call);

// kernels.cpp: kernels for tests of the driver layer itself.
const Kernel* test_kernel(const std::string& name);
/// Whether a kernel of this thread went wrong since somebody asked.
bool take_kernel_failure();
void fail_kernel();

}  // namespace farandole::cuda::fake

#define FAKE_CUDA extern "C" __attribute__((visibility("default"))) int

// A definition that is not as our table of functions says does not compile.
#define X(name, suffix, since, arguments) FAKE_CUDA cu##name##suffix arguments;
namespace farandole::cuda {
FARANDOLE_CUDA_FUNCTIONS(X)
FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)
}  // namespace farandole::cuda
#undef X
