// Tells the host that a stream has reached a mark, without asking the driver and without polling:
// by a word that the stream writes, and a doorbell that wakes a sleeping thread. Also tells how far
// a stream is behind the work that was put into it.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/driver/memory.h"
#include "cuda/driver/stream.h"

namespace farandole::cuda {

/// Operations of one stream, by count. Lives until the stream is done with all of them.
class CompletionCount {
 public:
  explicit CompletionCount(std::shared_ptr<const DeviceContext> context)
      : word_(std::move(context), sizeof(uint32_t)) {}

  /// Adds one to the count after the work now in the stream, and then rings `doorbell`; less than
  /// 0: no thread sleeps. Returns the number to wait for.
  uint32_t mark(const StreamRef& stream, int doorbell = -1);
  /// The same where a kernel will write the number there, last of all that is in the stream.
  uint32_t number_for_kernel() { return ++marked_; }
  DevicePointer address() const { return word_.address(); }

  /// Whether the stream has reached the mark, which it never does in a lost context: a long wait
  /// must ask the stream (idle()), which throws.
  bool reached(uint32_t number) const;

 private:
  PinnedMemory word_;
  uint32_t marked_ = 0;
};

/// How far a stream is behind. It holds some 1000 calls (1020 with driver 580), and the driver
/// blocks a thread that puts in one more. A thread that drives an engine must not wait there for
/// another rank's device.
class Backlog {
 public:
  explicit Backlog(std::shared_ptr<const DeviceContext> context) : marks_(std::move(context)) {}

  /// When something was put into the stream. Whether it marks the place: has_room() may change
  /// there.
  bool note(const StreamRef& stream);
  /// Whether as much again as between two notes has its place.
  bool has_room() const { return marks_.reached(marked_ - kMostMarks); }
  /// The mark that will follow the work now in the stream, once enough calls were put into it.
  uint32_t next_mark() const { return marked_ + 1; }
  bool reached(uint32_t mark) const { return marks_.reached(mark); }

 private:
  static constexpr uint32_t kBetweenMarks = 64, kMostMarks = 6;  // calls, and marks not come by
  CompletionCount marks_;
  uint32_t marked_ = 0, noted_ = 0;
};

}  // namespace farandole::cuda
