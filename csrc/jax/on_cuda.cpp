#include "jax/on_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "devices/library.h"
#include "devices/staged_call.h"
#include "jax/frame.h"

namespace farandole {
namespace {

constexpr auto kBetweenChecks = std::chrono::milliseconds(100);  // whether the group has failed

/// A CUstream, in which XLA has put what the call depends on.
uint64_t stream_of(const ffi::CallFrame& frame) {
  ffi::StreamGet asked{sizeof asked, nullptr, frame.context, nullptr};
  if (ffi::Error* error = frame.api->stream_get(&asked); error != nullptr) {
    ffi::ErrorDestroy gone{sizeof gone, nullptr, error};
    frame.api->error_destroy(&gone);
    throw Error(ErrorCode::device, "XLA names no stream for a call of a program on a CUDA device");
  }
  return reinterpret_cast<uint64_t>(asked.stream);
}

/// The device of the first array that has an address: all arrays of a call are on one device.
int device_of(const ffi::CallFrame& frame) {
  for (const ffi::Values* values : {&frame.arguments, &frame.results})
    for (int64_t i = 0; i < values->size; ++i) {
      const auto address = reinterpret_cast<uint64_t>(buffer_of(*values, i).data);
      if (address == 0) continue;
      require_devices();
      return cuda::device_of(*cuda::Driver::of_process(), address);
    }
  return 0;
}

/// The call's arrays on the host.
class HostFrame {
 public:
  HostFrame(StagedCopies& copies, const std::shared_ptr<DeviceQueue>& queue, ffi::CallFrame& frame)
      : copies_(copies), queue_(queue), frame_(frame) {
    buffers_.reserve(static_cast<size_t>(frame.arguments.size + frame.results.size));
    for (int64_t i = 0; i < std::max(frame.arguments.size, frame.results.size); ++i) {
      if (i < frame.arguments.size)
        add(arguments_, frame.arguments, i, [&](const DeviceSpan& s) { return copies_.bring(s); });
      if (i < frame.results.size)
        add(results_, frame.results, i,
            [&](const DeviceSpan& s) { return copies_.expect(s, is_in_place(i)); });
    }
    frame_.arguments.values = arguments_.data();
    frame_.results.values = results_.data();
  }
  HostFrame(const HostFrame&) = delete;
  HostFrame& operator=(const HostFrame&) = delete;

  ffi::CallFrame& frame() { return frame_; }

 private:
  static constexpr size_t kNone = 1;  // bytes of the place that stands for those of an empty array

  /// Where XLA has given the result the operand's memory.
  bool is_in_place(int64_t i) const {
    if (i >= frame_.arguments.size) return false;
    return buffer_of(frame_.arguments, i).data == buffer_of(frame_.results, i).data;
  }

  template <typename Place>
  void add(std::vector<void*>& to, const ffi::Values& from, int64_t i, const Place& place) {
    const Buffer given = buffer_of(from, i);
    ffi::Buffer& here = buffers_.emplace_back(*static_cast<const ffi::Buffer*>(from.values[i]));
    here.data = nothing_;
    if (given.count > 0)
      here.data = place({queue_, reinterpret_cast<uint64_t>(given.data), given.bytes()});
    to.push_back(&here);
  }

  StagedCopies& copies_;
  std::shared_ptr<DeviceQueue> queue_;
  ffi::CallFrame frame_;
  std::byte nothing_[kNone] = {};
  std::vector<ffi::Buffer> buffers_;
  std::vector<void*> arguments_, results_;
};

/// Looks whether a call's arrays have come, for a thread that waits until they have: copies wake
/// the thread that drives the engine.
class Arrival : public Task {
 public:
  Arrival(Engine& engine, StagedCopies& copies) : engine_(engine), copies_(&copies) {}

  bool poll(TimePoint) override {
    const std::lock_guard lock(mutex_);
    if (copies_ == nullptr || !is_known()) return false;
    copies_ = nullptr;
    over_.store(true, std::memory_order_release);  // partner: Driver::wait
    engine_.note_finished();
    return true;
  }
  void look_around(TimePoint) override {}

  const std::atomic<bool>& over() const { return over_; }
  /// Then: what kept them from coming; it names this rank.
  const std::optional<Error>& failure() const { return failure_; }
  /// The copies are asked nothing any more.
  void end() {
    const std::lock_guard lock(mutex_);
    copies_ = nullptr;
  }

 private:
  bool is_known() {
    try {
      return copies_->is_open();
    } catch (const Error& error) {
      failure_ = error;
      return true;
    }
  }

  Engine& engine_;
  std::mutex mutex_;  // guards copies_ and failure_
  StagedCopies* copies_;
  std::optional<Error> failure_;
  std::atomic<bool> over_{false};
};

/// For as long as the engine is to poll it.
class Polled {
 public:
  Polled(Engine& engine, std::shared_ptr<Arrival> arrival)
      : engine_(engine), arrival_(std::move(arrival)) {
    engine_.add_task(arrival_);
  }
  ~Polled() {
    arrival_->end();
    engine_.drop_task(arrival_);
  }
  Polled(const Polled&) = delete;
  Polled& operator=(const Polled&) = delete;

 private:
  Engine& engine_;
  std::shared_ptr<Arrival> arrival_;
};

void await_arrays(Group& group, StagedCopies& copies) {
  Engine& engine = *group.engine();
  const auto arrival = std::make_shared<Arrival>(engine, copies);
  if (!arrival->poll(TimePoint::min())) {
    const Polled polled(engine, arrival);
    while (!engine.driver().wait(arrival->over(), "arrays on a device",
                                 Deadline::after(kBetweenChecks)))
      group.check();
  }
  if (arrival->failure()) group.fail(*arrival->failure());
}

}  // namespace

std::optional<Error> call_on_host(Group& group, ffi::CallFrame& frame, const HostCall& call) {
  group.check();
  const auto staging = Staging::of(*group.engine());
  StagedCopies copies(staging, group.membership().detector, group.engine()->host().rank, nullptr);
  uint64_t stream = 0;
  std::shared_ptr<DeviceQueue> queue;
  std::optional<HostFrame> here;
  or_fail_group(group, [&] {
    stream = stream_of(frame);
    queue = staging->queue(device_of(frame));
    queue->follow(stream);
    here.emplace(copies, queue, frame);
    copies.seal();
  });
  await_arrays(group, copies);
  if (const std::optional<Error> error = call(here->frame())) return error;
  copies.take_back();
  copies.hand_over(queue->device(), stream);
  return std::nullopt;
}

}  // namespace farandole
