// Steps that become part of a CUDA graph, in the stream that is being captured: how they meet, and
// how the host learns of replays, of which it is not notified.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/kernels/parameters.h"
#include "cuda/work.h"

namespace farandole::cuda {

/// Belongs to one exchange. Graphs that have been captured use it as long as it lives.
class CapturedSteps {
 public:
  /// `counts`: in the device's memory, zero at first. Throws Error(device) where kernels are
  /// missing.
  CapturedSteps(const std::shared_ptr<const DeviceContext>& context, const DeviceModule& module,
                GraphCounts* counts);

  /// A collective. Throws Error(invalid_argument) where the stream is not being captured any more.
  void begin(StreamHandle stream, uint32_t number);
  void end();
  /// In between.
  const StreamRef& stream() const { return *stream_; }
  /// Orders the work now in the stream before later work in everybody's streams. Twice per piece.
  void meet(const Peers& peers);

  /// Whether there is a graph that has one. Any thread.
  bool has_graphs() const { return *graphs_ > 0; }
  /// Costs nothing. Any thread.
  CudaGraphState state() const;
  /// Whether there is an error for state() to report. Any thread.
  bool is_wrong() const { return word(words().wrong) != 0; }
  /// Whether so many replays of collectives have ended. Any thread.
  bool have_ended(uint32_t replays) const;
  /// From now on nobody waits in these flags. A kernel that sets one back meanwhile may undo it
  /// once.
  void drain(const StreamRef& stream, const Flags* own) const;

 private:
  void count_in(const StreamRef& captured);
  static uint32_t word(const uint32_t& of);
  GraphCollective collective() const;
  GraphWords* words_there() const;
  const GraphWords& words() const { return *reinterpret_cast<const GraphWords*>(words_.host()); }

  std::shared_ptr<const DeviceContext> context_;
  DeviceFunction begin_, end_, arrive_, pass_;
  GraphCounts* counts_;
  PinnedMemory words_;
  std::shared_ptr<std::atomic<int>> graphs_;  // collectives in graphs that are there
  std::optional<StreamRef> stream_;           // of the collective that is being captured
  uint32_t tag_ = 0;
  uint32_t met_ = 0;
};

}  // namespace farandole::cuda
