// The ways in which ranks that map each other's memory run a collective without messages.
//
//   lines     every rank writes its data in cache lines that carry their own flag; one transit
//   one_shot  every rank shows all of its input in pieces; everybody finishes alone; one wait
//   window    buffers that all ranks map: rank r folds part r and stores it to all; two waits
//   staged    blocks are copied through shared memory where a buffer is its owner's alone
//
// All fold in canonical order. Designs and measurements: docs/benchmarks.md.
#pragma once

#include <memory>
#include <vector>

#include "engine/backend.h"
#include "engine/stream_page.h"

namespace farandole {

class DirectPath {
 public:
  virtual ~DirectPath() = default;
  /// Before the ranks have agreed: writes this rank's own page only.
  virtual void start(const Operation& operation) = 0;
  /// Meanwhile: more of this rank's own; true if there was more.
  virtual bool show() { return false; }
  /// After they have.
  virtual Progress poll(TimePoint until) = 0;
};

/// Up to here data that all ranks map are copied too: that is less than waiting until all have read
/// them, or stored to them. In our memory at 4 KiB: 2.0 us by the window, 1.3 by copies.
inline constexpr size_t kPieceBytes = 4 << 10;  // of one_shot; whole elements of every type

std::unique_ptr<DirectPath> make_lines(const StreamMemory& memory);
std::unique_ptr<DirectPath> make_one_shot(const StreamMemory& memory);
std::unique_ptr<DirectPath> make_window(const StreamMemory& memory);
std::unique_ptr<DirectPath> make_staged(const StreamMemory& memory);

/// What paths work out from the operation and the ranks' published places.
class DirectOperation {
 public:
  void start(const Operation& operation, const StreamMemory& memory);

  const Operation& operation() const { return *operation_; }
  /// Where rank r's input (output) is mapped here; null when only its owner maps it.
  const std::byte* input_of(int r) const {
    return mapped(r, &Places::input, operation_->input.bytes());
  }
  std::byte* output_of(int r) const {
    return mapped(r, &Places::output, operation_->output.bytes());
  }
  bool all_shared() const;
  bool mine_is_shared() const { return input_of(memory_->rank) != nullptr; }

  /// Works out this rank's output from all inputs, given where each can be read.
  void finish(const std::vector<const std::byte*>& inputs, const struct Scales& scales,
              std::byte* output) const;

 private:
  std::byte* mapped(int r, std::atomic<uint64_t> Places::* which, size_t bytes) const;

  const Operation* operation_ = nullptr;
  const StreamMemory* memory_ = nullptr;
};

}  // namespace farandole
