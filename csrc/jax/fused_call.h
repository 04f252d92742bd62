// One call on its way through the engine: its arrays as operations, how they end.
#pragma once

#include <memory>
#include <optional>

#include "jax/call.h"

namespace farandole {

/// Used by one thread at a time.
class FusedCall {
 public:
  /// Throws Error(invalid_argument) for what this rank can know to be wrong.
  FusedCall(std::shared_ptr<Group> group, JaxCall call);

  /// Submits all operations to the stream, in the order that all ranks have. The thread
  /// that launches has finish() called, by itself or by another thread that is at hand.
  void launch(const std::shared_ptr<Stream>& stream);
  /// finish() would not wait.
  bool is_over() const { return operations_.done(); }
  /// Drives the engine until nothing is under way any more, puts results in their places, and says
  /// what went wrong. Once.
  std::optional<Error> finish();

 private:
  const std::shared_ptr<Group> group_;
  Grouped operations_;
  std::optional<Error> error_;  // the first
};

}  // namespace farandole
