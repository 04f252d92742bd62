// One call on its way through the engine: its arrays are cut into operations, small ones packed
// together, reduced, unpacked.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "jax/call.h"
#include "transport/buffer_pool.h"

namespace farandole {

/// Used by one thread at a time.
class FusedCall {
 public:
  /// Throws Error(invalid_argument) for what this rank can know to be wrong.
  FusedCall(std::shared_ptr<Group> group, JaxCall call);

  /// Submits all operations to the stream, in the order that all ranks have. Whoever launches has
  /// finish() called, by itself or by another thread that is at hand.
  void launch(const std::shared_ptr<Stream>& stream, BufferPool& pool);
  /// finish() would not wait.
  bool is_over() const;
  /// Drives the engine until nothing is under way any more, puts results in their places, and says
  /// what went wrong. Once.
  std::optional<Error> finish();

 private:
  struct Pack {
    std::vector<size_t> members;
    std::shared_ptr<std::byte> memory;  // null: one array, by itself
    size_t bytes = 0;
    Handle handle;
  };
  void plan();
  Buffer fill(Pack& pack, BufferPool& pool) const;
  void submit(Pack& pack, const std::shared_ptr<Stream>& stream, BufferPool& pool);
  void unpack(const Pack& pack) const;
  Options options_of(const Pack& pack) const;

  const std::shared_ptr<Group> group_;
  JaxCall call_;
  std::vector<Pack> packs_;
  std::optional<Error> error_;  // the first
};

}  // namespace farandole
