#include "cuda/driver/copy_streams.h"

namespace farandole::cuda {

CopyStreams::CopyStreams(const std::shared_ptr<const DeviceContext>& context, int doorbell)
    : context_(context),
      doorbell_(doorbell),
      arrived_(context),
      left_(context),
      event_(context),
      to_host_(context),
      to_device_(context) {}

uint32_t CopyStreams::mark(CudaWay way) {
  const std::lock_guard lock(marking_);
  // Nobody sleeps until copies have left: their owner's stream waits by itself.
  return way == kToHost ? arrived_.mark(to_host_, doorbell_) : left_.mark(to_device_);
}

bool CopyStreams::reached(CudaWay way, uint32_t number) const {
  return (way == kToHost ? arrived_ : left_).reached(number);
}

void CopyStreams::look_for_loss() const {
  to_host_.idle();
  to_device_.idle();
}

void CopyStreams::follow(StreamHandle stream) {
  const DeviceContext::Use all_calls(*context_);
  order(users(stream), to_host_);
}

void CopyStreams::precede(StreamHandle stream) {
  const DeviceContext::Use all_calls(*context_);
  order(to_device_, users(stream));
}

/// In a graph the event would be recorded as often as that is launched, and never now.
StreamRef CopyStreams::users(StreamHandle stream) const {
  StreamRef users(context_, stream);
  users.refuse_capture();
  return users;
}

void CopyStreams::order(const StreamRef& earlier, const StreamRef& later) {
  const std::lock_guard lock(ordering_);
  event_.record(earlier);
  later.wait(event_);
}

}  // namespace farandole::cuda
