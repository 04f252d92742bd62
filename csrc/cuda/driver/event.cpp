#include "cuda/driver/event.h"

namespace farandole::cuda {

DeviceEvent::DeviceEvent(std::shared_ptr<const DeviceContext> context, Timing timing)
    : context_(std::move(context)) {
  const DeviceContext::Use driver(*context_);
  const unsigned flags = timing == Timing::on ? kEventTimed : kEventUntimed;
  context_->check(driver->EventCreate(&handle_, flags), "cuEventCreate", "make an event");
}

DeviceEvent::~DeviceEvent() {
  context_->at_end("cuEventDestroy",
                   [&](const auto& driver) { return driver.EventDestroy(handle_); });
}

void DeviceEvent::record(const StreamRef& stream) {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->EventRecord(handle_, stream.put()), "cuEventRecord", "record an event");
}

bool DeviceEvent::complete() const {
  const DeviceContext::Use driver(*context_);
  const DriverCode code = driver->EventQuery(handle_);
  if (code == kNotReady) return false;
  context_->check(code, "cuEventQuery", "ask whether an event is complete");
  return true;
}

void DeviceEvent::synchronize() const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->EventSynchronize(handle_), "cuEventSynchronize", "wait for an event");
}

float DeviceEvent::milliseconds_since(const DeviceEvent& earlier) const {
  float milliseconds = 0;
  const DeviceContext::Use driver(*context_);
  context_->check(driver->EventElapsedTime(&milliseconds, earlier.handle_, handle_),
                  "cuEventElapsedTime", "ask for the time between two events");
  return milliseconds;
}

}  // namespace farandole::cuda
