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
    : library_(cuda_library()),
      device_(device),
      doorbell_(checked(::fcntl(doorbell, F_DUPFD_CLOEXEC, 0), "fcntl")),
      queue_(ask_cuda(library_.open_queue, device, doorbell_.get()), library_.close_queue) {}

DevicePages DeviceQueue::register_pages(std::byte* pages, size_t bytes) {
  return {ask_cuda(library_.register_pages, queue_.get(), pages, bytes), library_.release_pages};
}

DeviceRoom DeviceQueue::allocate(size_t bytes) {
  DeviceRoom room;
  CudaMemory* const made = ask_cuda(library_.allocate, queue_.get(), bytes, &room.address);
  room.memory = {made, library_.release};
  return room;
}

void DeviceQueue::copy_to_host(const DevicePages& to, uint64_t from, size_t bytes, size_t offset) {
  ask_cuda(library_.copy_to_host, queue_.get(), to.get(), offset, from, bytes);
}

void DeviceQueue::copy_to_device(uint64_t to, const DevicePages& from, size_t bytes,
                                 size_t offset) {
  ask_cuda(library_.copy_to_device, queue_.get(), to, from.get(), offset, bytes);
}

uint32_t DeviceQueue::mark(CudaWay way) {
  uint32_t number = 0;
  ask_cuda(library_.mark, queue_.get(), way, &number);
  return number;
}

}  // namespace farandole
