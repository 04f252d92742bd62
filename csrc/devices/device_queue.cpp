#include "devices/device_queue.h"

#include <fcntl.h>

namespace farandole {

bool LossWatch::due() {
  constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
  const TimePoint when = now();
  if (when < next_) return false;
  const bool is_first = next_ == TimePoint{};
  next_ = when + kBetweenLooks;
  return !is_first;
}

DeviceQueue::DeviceQueue(int device, int doorbell)
    : doorbell_(checked(::fcntl(doorbell, F_DUPFD_CLOEXEC, 0), "fcntl")),
      streams_(cuda::DeviceContext::retain(cuda::Driver::of_process(), device), doorbell_.get()) {}

DevicePages DeviceQueue::register_pages(std::byte* pages, size_t bytes) {
  return std::make_shared<cuda::RegisteredPages>(streams_.context(), std::span(pages, bytes));
}

DeviceRoom DeviceQueue::allocate(size_t bytes) {
  std::shared_ptr<cuda::DeviceMemory> memory =
      cuda::allocate_device(streams_.context(), bytes, cuda::Sharing::none);
  const cuda::StreamRef& stream = streams_.stream(kToDevice);
  stream.fill(memory->address(), 0, bytes);
  stream.synchronize();
  const uint64_t address = memory->address();
  return {std::move(memory), address};
}

bool DeviceQueue::is_captured(uint64_t stream) const {
  return cuda::StreamRef(streams_.context(), std::bit_cast<cuda::StreamHandle>(stream))
      .is_captured();
}

}  // namespace farandole
