// Events: how one stream waits for another, and how the host asks whether a stream has come by.
#pragma once

#include <memory>

#include "cuda/driver/stream.h"

namespace farandole::cuda {

enum class Timing : uint8_t { off, on };

class DeviceEvent {
 public:
  explicit DeviceEvent(std::shared_ptr<const DeviceContext> context, Timing timing = Timing::off);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  EventHandle handle() const { return handle_; }

  /// Stands for all that is in the stream now, and no more for what it stood for before.
  void record(const StreamRef& stream);
  /// Whether the stream has come by, or it was never recorded. Throws the context's lasting error.
  bool complete() const;
  /// Blocks the host until the stream has come by.
  void synchronize() const;
  /// From `earlier` to this one: both timed, and complete.
  float milliseconds_since(const DeviceEvent& earlier) const;

 private:
  std::shared_ptr<const DeviceContext> context_;
  EventHandle handle_ = nullptr;
};

}  // namespace farandole::cuda
