// Streams that are captured into graphs, and graphs that are launched: of one stream each. One that
// waits for an event of a captured stream is captured, too, and never joined again. A graph is its
// own executable one.
#include <algorithm>
#include <array>
#include <string_view>

#include "state.h"

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

namespace {

constexpr int kInvalidated = 901, kUnmatched = 903;
constexpr int kGlobal = 0;

/// Calls that may wait for other streams.
constexpr std::array<std::string_view, 11> kUnsafe{
    "cuMemAlloc",         "cuMemFree",           "cuMemHostAlloc",    "cuMemFreeHost",
    "cuMemHostRegister",  "cuMemHostUnregister", "cuEventQuery",      "cuStreamQuery",
    "cuEventSynchronize", "cuStreamSynchronize", "cuModuleLoadDataEx"};

int& capture_mode() {
  thread_local int mode = kGlobal;
  return mode;
}

/// Whether what this thread calls concerns that capture.
bool concerns(const CUgraph_st& graph) {
  const bool own = graph.thread == std::this_thread::get_id();
  if (capture_mode() == kRelaxedCapture || graph.mode == kRelaxedCapture) return false;
  return own || (graph.mode == kGlobal && capture_mode() == kGlobal);
}

}  // namespace

int farandole::cuda::fake::spoil(State& all, const std::string& call) {
  if (all.captures.empty() || std::ranges::find(kUnsafe, call) == kUnsafe.end()) return kSuccess;
  for (CUgraph_st* const graph : all.captures)
    if (concerns(*graph)) return spoilt(*graph);
  return kSuccess;
}

int farandole::cuda::fake::spoilt(CUgraph_st& graph, int code) {
  graph.spoilt = true;
  return code;
}

int farandole::cuda::fake::capture(const char* call, CUgraph_st* graph, std::function<int()> run,
                                   const std::vector<std::pair<DevicePointer, size_t>>& ranges) {
  if (graph->spoilt) return kInvalidated;
  graph->nodes.push_back({call, std::move(run), ranges});
  return kSuccess;
}

FAKE_CUDA cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode(), *mode);
  return kSuccess;
}

FAKE_CUDA cuStreamBeginCapture_v2(CUstream_st* stream, int mode) {
  return call("cuStreamBeginCapture", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.streams.contains(stream) || stream->capturing != nullptr) return kInvalidValue;
    auto* const graph = all.make<CUgraph_st>();
    graph->context = context;
    graph->mode = mode;
    graph->thread = std::this_thread::get_id();
    stream->capturing = graph;
    all.captures.insert(graph);
    return kSuccess;
  });
}

FAKE_CUDA cuStreamEndCapture(CUstream_st* stream, CUgraph_st** graph) {
  return call("cuStreamEndCapture", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    if (!all.streams.contains(stream) || stream->capturing == nullptr) return kUnmatched;
    *graph = std::exchange(stream->capturing, nullptr);
    all.captures.erase(*graph);
    for (CUstream_st* const other : all.streams)
      if (other->capturing == *graph) {  // it waits for an event of the captured one
        other->capturing = nullptr;
        (*graph)->spoilt = true;
      }
    return (*graph)->spoilt ? kInvalidated : kSuccess;
  });
}

FAKE_CUDA cuStreamGetCaptureInfo_v2(StreamHandle stream, int* status, unsigned long long* id,
                                    GraphHandle* graph, const GraphNodeHandle**, size_t*) {
  return call("cuStreamGetCaptureInfo", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    if (!all.streams.contains(stream)) return 400;
    *graph = stream->capturing;
    *status = *graph == nullptr ? 0 : (*graph)->spoilt ? 2 : 1;
    *id = reinterpret_cast<uintptr_t>(*graph);
    return static_cast<int>(kSuccess);
  });
}

FAKE_CUDA cuUserObjectCreate(UserObjectHandle* object, void* user, HostFunction destroy, unsigned,
                             unsigned) {
  return call("cuUserObjectCreate", Needs::context, [&](State& all, Lock&, CUctx_st*) {
    *object = all.make<CUuserObject_st>();
    (*object)->destroy = [destroy, user] { destroy(user); };
    return kSuccess;
  });
}

FAKE_CUDA cuGraphRetainUserObject(GraphHandle graph, UserObjectHandle object, unsigned, unsigned) {
  return call("cuGraphRetainUserObject", Needs::context, [&](State&, Lock&, CUctx_st*) {
    graph->objects.push_back(object);
    return kSuccess;
  });
}

/// The graph must not be running.
FAKE_CUDA cuGraphDestroy(GraphHandle graph) {
  std::vector<UserObjectHandle> objects;
  const int code = call("cuGraphDestroy", Needs::context, [&](State&, Lock&, CUctx_st*) {
    graph->nodes.clear();
    objects.swap(graph->objects);
    return kSuccess;
  });
  for (const UserObjectHandle object : objects) object->destroy();
  return code;
}

FAKE_CUDA cuGraphLaunch(CUgraph_st* graph, CUstream_st* stream) {
  return call("cuGraphLaunch", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    for (const Node& node : graph->nodes)
      if (const int code = enqueue(all, node.call.c_str(), context, stream, node.run, node.ranges);
          code != kSuccess)
        return code;
    return kSuccess;
  });
}
