// Steps that become part of a CUDA graph, in the stream that is being captured: how they meet, and
// what the host hears of replays, which nobody tells it of.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "base/cuda_table.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/kernels/parameters.h"

namespace farandole::cuda {

/// Of one exchange. Graphs that have been captured use it as long as it lives.
class CapturedSteps {
 public:
  /// Throws Error(device) where kernels are missing.
  CapturedSteps(const std::shared_ptr<const DeviceContext>& context, const DeviceModule& module);

  /// A collective of so many pieces. Throws Error(invalid_argument) where the stream is not being
  /// captured any more.
  void begin(StreamHandle stream, uint32_t number, uint64_t pieces);
  void end() { stream_.reset(); }
  /// In between.
  bool is_open() const { return stream_.has_value(); }
  const StreamRef& stream() const { return *stream_; }
  /// What is in the stream now comes before what is in everybody's afterwards. Twice a piece.
  void meet(const Peers& peers);

  /// Costs nothing. Any thread.
  CudaGraphState state() const;
  /// Whether so many replays of collectives have ended. Any thread.
  bool have_ended(uint32_t replays) const;
  /// From now on nobody waits in these flags.
  static void drain(const StreamRef& stream, const Flags* own);

 private:
  uint32_t word(const uint32_t& of) const;
  const GraphWords& words() const { return *reinterpret_cast<const GraphWords*>(words_.host()); }

  std::shared_ptr<const DeviceContext> context_;
  DeviceFunction arrive_, pass_;
  PinnedMemory words_;
  std::optional<StreamRef> stream_;  // of the collective that is being captured
  uint32_t tag_ = 0;
  uint64_t meetings_ = 0, met_ = 0;
};

}  // namespace farandole::cuda
