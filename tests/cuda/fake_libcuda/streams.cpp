// Streams, a thread each, and events.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>

#include "state.h"

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

namespace {

constexpr int kIsolation = 905;

using Clock = std::chrono::steady_clock;

double seconds_now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

/// A little while, of a length that a seed decides.
void linger(uint64_t seed) {
  if (seed == 0) return;
  static std::atomic<uint64_t> turn{0};
  uint64_t x = (seed + ++turn) * 0x9e3779b97f4a7c15;
  x ^= x >> 29;
  std::this_thread::sleep_for(std::chrono::microseconds(x % 300));
}

bool is_busy(const CUstream_st& stream) { return stream.running || !stream.queue.empty(); }

void release(State& all, const std::vector<DevicePointer>& uses) {
  for (const DevicePointer base : uses)
    if (const auto found = all.regions.find(base); found != all.regions.end()) --found->second.uses;
}

void run_stream(CUstream_st* stream) {
  State& all = state();
  Lock lock(all.mutex);
  const auto may_go_on = [&] {
    const bool stopped = all.held && stream->context->lost == 0 && !stream->closing;
    return (!stream->queue.empty() && !stopped) || (stream->closing && stream->queue.empty());
  };
  for (;;) {
    all.changed.wait(lock, may_go_on);
    if (stream->queue.empty()) return;
    const Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    if (stream->context->lost == 0) {  // else it never happens
      const uint64_t jitter = all.config.jitter;
      lock.unlock();
      linger(jitter);
      const int code = work.run();
      lock.lock();
      if (code != kSuccess && stream->context->lost == 0) stream->context->lost = code;
      if (work.finish) work.finish();
    }
    release(all, work.uses);
    stream->running = false;
    all.changed.notify_all();
  }
}

CUstream_st* make_stream(State& all, CUctx_st* context, unsigned flags) {
  auto* const stream = all.make<CUstream_st>();
  stream->context = context;
  stream->flags = flags;
  stream->thread = std::thread(run_stream, stream);
  return stream;
}

/// As a call names it; null where it may not be used.
CUstream_st* find_stream(State& all, const char* call, CUctx_st* context, CUstream_st* stream) {
  if (reinterpret_cast<uintptr_t>(stream) <= 2) {  // the default stream, by each of its names
    CUstream_st*& found = all.default_streams[context];
    if (found == nullptr) found = make_stream(all, context, 0);
    return found;
  }
  if (!all.streams.contains(stream)) {
    all.blame(std::string(call) + " of a stream that is not there");
    return nullptr;
  }
  if (stream->context != context) {
    all.blame(std::string(call) + " of a stream of another context");
    return nullptr;
  }
  return stream;
}

template <typename Body>
int of_stream(const char* name, CUstream_st* stream, const Body& body) {
  return call(name, Needs::context, [&](State& all, Lock& lock, CUctx_st* context) {
    CUstream_st* const found = find_stream(all, name, context, stream);
    return found == nullptr ? 400 : body(all, lock, found);
  });
}

template <typename Body>
int of_event(const char* name, CUevent_st* event, const Body& body) {
  return call(name, Needs::context, [&](State& all, Lock& lock, CUctx_st*) {
    if (!all.events.contains(event)) {
      all.blame(std::string(name) + " of an event that is not there");
      return 400;
    }
    return body(all, lock);
  });
}

/// Works on addresses that are all known; pageable memory of the host makes copies wait in CUDA.
int enqueue_on(const char* name, CUstream_st* stream,
               const std::vector<std::pair<DevicePointer, size_t>>& ranges,
               std::function<int()> run) {
  return call(name, Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    return enqueue(all, name, context, stream, std::move(run), ranges);
  });
}

std::atomic_ref<uint32_t> word_at(DevicePointer address) {
  return std::atomic_ref(*static_cast<uint32_t*>(host(address)));
}

/// By the stream's thread.
int wait_for_word(CUctx_st* context, DevicePointer address, uint32_t value, unsigned flags) {
  for (;;) {
    const uint32_t word = word_at(address).load(std::memory_order_acquire);
    if (flags == kWaitUntilAnyBit ? (word & value) != 0 : static_cast<int32_t>(word - value) >= 0)
      return kSuccess;
    {
      const Lock lock(state().mutex);
      if (context->lost != 0) return context->lost;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));  // others need the core
  }
}

/// The driver holds up a thread that puts more into a stream than it has room for.
void wait_for_room(State& all, const CUstream_st& stream) {
  Lock lock(all.mutex, std::adopt_lock);  // the caller's
  all.changed.wait(lock, [&] {
    return stream.queue.size() < all.config.stream_room || stream.context->lost != 0;
  });
  lock.release();
}

}  // namespace

int farandole::cuda::fake::enqueue(State& all, const char* call, CUctx_st* context,
                                   CUstream_st* stream, std::function<int()> run,
                                   const std::vector<std::pair<DevicePointer, size_t>>& ranges,
                                   std::function<void()> finish) {
  CUstream_st* const found = find_stream(all, call, context, stream);
  if (found == nullptr) return 400;
  if (found->capturing != nullptr) return capture(call, found->capturing, std::move(run), ranges);
  Work work{std::move(run), std::move(finish), {}};
  for (const auto& [address, bytes] : ranges) {
    if (all.region_of(call, address, bytes) == nullptr) {
      all.blame(std::string(call) + " uses memory that the device does not know");
      return kInvalidValue;
    }
    work.uses.push_back(std::prev(all.regions.upper_bound(address))->first);
  }
  for (const DevicePointer base : work.uses) ++all.regions[base].uses;
  wait_for_room(all, *found);
  found->queue.push_back(std::move(work));
  all.changed.notify_all();
  return kSuccess;
}

void farandole::cuda::fake::end_streams(Lock& lock, CUctx_st* context) {
  State& all = state();
  std::vector<CUstream_st*> ending;
  const auto end = [&](CUstream_st* stream) {
    if (stream->context == context) ending.push_back(stream);
  };
  for (CUstream_st* const stream : all.streams) end(stream);
  for (CUstream_st* const stream : all.ending) end(stream);
  for (const auto& [owner, stream] : all.default_streams) end(stream);
  for (CUstream_st* const stream : ending) {
    if (is_busy(*stream) && context->lost == 0) all.blame("a context ends while a stream has work");
    stream->closing = true;
    all.streams.erase(stream);
    std::erase(all.ending, stream);
  }
  all.default_streams.erase(context);
  all.changed.notify_all();
  lock.unlock();
  for (CUstream_st* const stream : ending) stream->thread.join();
  lock.lock();
}

FAKE_CUDA cuStreamCreateWithPriority(StreamHandle* stream, unsigned flags, int) {
  return call("cuStreamCreateWithPriority", Needs::context,
              [&](State& all, Lock&, CUctx_st* context) {
                if (flags > kStreamNonBlocking) return kInvalidValue;
                *stream = make_stream(all, context, flags);
                all.streams.insert(*stream);
                return kSuccess;
              });
}

FAKE_CUDA cuStreamDestroy_v2(StreamHandle stream) {
  return of_stream("cuStreamDestroy", stream, [](State& all, Lock&, CUstream_st* found) {
    all.streams.erase(found);  // what is in it still runs
    found->closing = true;
    all.ending.push_back(found);
    all.changed.notify_all();
    return kSuccess;
  });
}

FAKE_CUDA cuStreamSynchronize(StreamHandle stream) {
  return of_stream("cuStreamSynchronize", stream, [](State& all, Lock& lock, CUstream_st* found) {
    if (found->capturing != nullptr) return spoilt(*found->capturing);
    all.changed.wait(lock, [&] { return !is_busy(*found) || found->context->lost != 0; });
    return found->context->lost;
  });
}

/// farandole never calls this: by it a program sees that no work is left on a device.
FAKE_CUDA cuCtxSynchronize() {
  return call("cuCtxSynchronize", Needs::context, [](State& all, Lock& lock, CUctx_st* context) {
    const auto rests = [&](CUstream_st* stream) {
      return stream->context != context || !is_busy(*stream);
    };
    all.changed.wait(lock, [&] {
      const auto& ours = all.streams;
      return context->lost != 0 || (std::all_of(ours.begin(), ours.end(), rests) &&
                                    std::all_of(all.ending.begin(), all.ending.end(), rests));
    });
    return context->lost;
  });
}

FAKE_CUDA cuStreamQuery(StreamHandle stream) {
  return of_stream("cuStreamQuery", stream, [](State&, Lock&, CUstream_st* found) {
    if (found->capturing != nullptr) return spoilt(*found->capturing);
    return is_busy(*found) ? kNotReady : kSuccess;
  });
}

FAKE_CUDA cuStreamIsCapturing(StreamHandle stream, int* status) {
  return of_stream("cuStreamIsCapturing", stream, [&](State&, Lock&, CUstream_st* found) {
    *status = found->capturing == nullptr ? 0 : found->capturing->spoilt ? 2 : 1;
    return kSuccess;
  });
}

FAKE_CUDA cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned) {
  return of_event("cuStreamWaitEvent", event, [&](State& all, Lock&) {
    CUstream_st* const waiting =
        find_stream(all, "cuStreamWaitEvent", current_contexts().back(), stream);
    if (waiting == nullptr) return 400;
    if (event->captured != nullptr) {
      waiting->capturing = event->captured;
      return kSuccess;
    }
    if (waiting->capturing != nullptr) return spoilt(*waiting->capturing, kIsolation);
    const auto wait = [event, record = event->last] {
      State& later = state();
      Lock lock(later.mutex);
      later.changed.wait(lock,
                         [&] { return !record || record->complete || event->context->lost != 0; });
      return event->context->lost;
    };
    return enqueue(all, "cuStreamWaitEvent", current_contexts().back(), stream, wait);
  });
}

FAKE_CUDA cuStreamWriteValue32_v2(StreamHandle stream, DevicePointer address, uint32_t value,
                                  unsigned) {
  return call("cuStreamWriteValue32", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.config.memory_operations) return static_cast<int>(kNotSupported);
    const auto write = [=] {
      word_at(address).store(value, std::memory_order_release);
      return static_cast<int>(kSuccess);
    };
    return enqueue(all, "cuStreamWriteValue32", context, stream, write, {{address, sizeof value}});
  });
}

FAKE_CUDA cuStreamWaitValue32_v2(StreamHandle stream, DevicePointer address, uint32_t value,
                                 unsigned flags) {
  return call("cuStreamWaitValue32", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.config.memory_operations) return static_cast<int>(kNotSupported);
    const auto wait = [=] { return wait_for_word(context, address, value, flags); };
    return enqueue(all, "cuStreamWaitValue32", context, stream, wait, {{address, sizeof value}});
  });
}

FAKE_CUDA cuStreamBatchMemOp_v2(StreamHandle stream, unsigned count, MemoryOperation* operations,
                                unsigned) {
  return call("cuStreamBatchMemOp", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.config.memory_operations) return static_cast<int>(kNotSupported);
    if (count > 255) return static_cast<int>(kInvalidValue);
    std::vector<std::pair<DevicePointer, size_t>> words;
    std::vector<MemoryOperation> batch;
    for (unsigned i = 0; i < count; ++i) {
      // Drivers know no unfenced write in these calls (cuda.h).
      if (operations[i].kind == kWriteWord && operations[i].flags != 0)
        return static_cast<int>(kInvalidValue);
      words.emplace_back(operations[i].address, sizeof(uint32_t));
      const Region* const at = all.region_of("cuStreamBatchMemOp", words.back().first, 4);
      const bool lost = operations[i].kind == kWriteWord && at != nullptr && at->drops_words;
      if (!lost) batch.push_back(operations[i]);
    }
    const auto act = [=] {
      for (const MemoryOperation& one : batch) {
        const auto value = static_cast<uint32_t>(one.value);
        if (one.kind == kWriteWord) {
          word_at(one.address).store(value, std::memory_order_release);
        } else if (one.kind != kWaitForWord) {
          return static_cast<int>(kInvalidValue);
        } else if (const int code = wait_for_word(context, one.address, value, one.flags)) {
          return code;
        }
      }
      return static_cast<int>(kSuccess);
    };
    return enqueue(all, "cuStreamBatchMemOp", context, stream, act, words);
  });
}

FAKE_CUDA cuLaunchHostFunc(StreamHandle stream, HostFunction act, void* user) {
  return enqueue_on("cuLaunchHostFunc", stream, {}, [=] {
    in_host_function() = true;
    act(user);
    in_host_function() = false;
    return kSuccess;
  });
}

FAKE_CUDA cuMemcpyAsync(DevicePointer to, DevicePointer from, size_t bytes, StreamHandle stream) {
  if (bytes == 0) return enqueue_on("cuMemcpyAsync", stream, {}, [] { return kSuccess; });
  return enqueue_on("cuMemcpyAsync", stream, {{to, bytes}, {from, bytes}}, [=] {
    std::memmove(host(to), host(from), bytes);
    return kSuccess;
  });
}

FAKE_CUDA cuMemsetD8Async(DevicePointer to, unsigned char value, size_t bytes,
                          StreamHandle stream) {
  return enqueue_on("cuMemsetD8Async", stream, {{to, bytes}}, [=] {
    std::memset(host(to), value, bytes);
    return kSuccess;
  });
}

FAKE_CUDA cuMemsetD32Async(DevicePointer to, unsigned value, size_t count, StreamHandle stream) {
  return enqueue_on("cuMemsetD32Async", stream, {{to, count * sizeof value}}, [=] {
    for (size_t i = 0; i < count; ++i)
      word_at(to + i * sizeof value).store(value, std::memory_order_release);
    return kSuccess;
  });
}

FAKE_CUDA cuEventCreate(EventHandle* event, unsigned flags) {
  return call("cuEventCreate", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    *event = all.make<CUevent_st>();
    (*event)->context = context;
    (*event)->timed = flags == kEventTimed;
    all.events.insert(*event);
    return kSuccess;
  });
}

FAKE_CUDA cuEventDestroy_v2(EventHandle event) {
  return of_event("cuEventDestroy", event, [&](State& all, Lock&) {
    all.events.erase(event);
    return kSuccess;
  });
}

FAKE_CUDA cuEventRecord(EventHandle event, StreamHandle stream) {
  return of_event("cuEventRecord", event, [&](State& all, Lock&) {
    CUctx_st* const context = current_contexts().back();
    if (event->context != context) {
      all.blame("cuEventRecord of an event of another context");
      return 400;
    }
    CUstream_st* const recording = find_stream(all, "cuEventRecord", context, stream);
    if (recording == nullptr) return 400;
    event->captured = recording->capturing;
    if (event->captured != nullptr) return static_cast<int>(kSuccess);
    const auto record = std::make_shared<EventRecord>();
    const auto finish = [=] { *record = {.complete = true, .time = seconds_now()}; };
    const auto nothing = [] { return kSuccess; };
    const int code = enqueue(all, "cuEventRecord", context, stream, nothing, {}, finish);
    if (code == kSuccess) event->last = record;
    return code;
  });
}

FAKE_CUDA cuEventQuery(EventHandle event) {
  return of_event("cuEventQuery", event,
                  [&](State&, Lock&) { return event->is_complete() ? kSuccess : kNotReady; });
}

FAKE_CUDA cuEventSynchronize(EventHandle event) {
  return of_event("cuEventSynchronize", event, [&](State& all, Lock& lock) {
    const auto record = event->last;
    all.changed.wait(lock,
                     [&] { return !record || record->complete || event->context->lost != 0; });
    return event->context->lost;
  });
}

FAKE_CUDA cuEventElapsedTime(float* milliseconds, EventHandle from, EventHandle to) {
  return of_event("cuEventElapsedTime", to, [&](State& all, Lock&) {
    if (!all.events.contains(from) || !from->timed || !to->timed || !from->last || !to->last)
      return 400;
    if (!from->last->complete || !to->last->complete) return kNotReady;
    *milliseconds = static_cast<float>((to->last->time - from->last->time) * 1e3);
    return kSuccess;
  });
}
