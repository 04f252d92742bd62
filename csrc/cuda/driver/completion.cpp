#include "cuda/driver/completion.h"

#include <atomic>

namespace farandole::cuda {

uint32_t CompletionCount::mark(const StreamRef& stream, int doorbell) {
  stream.write(word_.address(), marked_ + 1);
  ++marked_;
  if (doorbell >= 0) stream.ring(doorbell);
  return marked_;
}

bool CompletionCount::reached(uint32_t number) const {
  auto& word = *reinterpret_cast<uint32_t*>(word_.host());
  const uint32_t now = std::atomic_ref(word).load(std::memory_order_acquire);
  return static_cast<int32_t>(now - number) >= 0;  // it wraps
}

bool Backlog::note(const StreamRef& stream) {
  if (stream.calls() - noted_ < kBetweenMarks) return false;
  marked_ = marks_.mark(stream);
  noted_ = stream.calls();
  return true;
}

}  // namespace farandole::cuda
