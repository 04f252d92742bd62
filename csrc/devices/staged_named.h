// An operation by name on arrays of devices: named at once, and begun when its arrays have come to
// the host.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "devices/staged_arrays.h"
#include "named/named.h"

namespace farandole {

/// One tensor of the call. Without an output a result is made when its size is known: on the host
/// at first, in memory that the input's device reads.
struct PlacedTensor {
  PlacedArray input;
  std::optional<PlacedArray> output;
  std::span<const int64_t> shape;  // of the input
};

/// Held until its request has been released.
class StagedNamed : public NamedListener {
 public:
  /// As Named::submit, whose listener and gate this is. `kept`: what keeps the arrays. Whatever
  /// else than an argument fails on this rank fails the world: the others may be waiting for it.
  static std::shared_ptr<StagedNamed> submit(Group& world, Named& named, NamedCall call,
                                             const std::vector<PlacedTensor>& tensors,
                                             std::shared_ptr<const void> kept);
  StagedNamed(Group& world, std::shared_ptr<const void> kept);
  ~StagedNamed() override;

  NamedRequest* request() const { return request_; }
  /// Once the request has ended well: results are copied back.
  void take_back() { copies_->take_back(); }
  /// Of each device with outputs, one of them.
  const std::map<int, size_t>& outputs() const { return outputs_; }
  /// Then: StagedCopies::hand_over.
  void hand_over(int device, std::optional<uint64_t> stream) { copies_->hand_over(device, stream); }

  /// A result that was made for a tensor: where it lies if it belongs on the host, as its tensor
  /// does.
  bool is_for_host(size_t tensor) const { return !made_[tensor].queue; }
  const std::shared_ptr<std::byte>& memory(size_t tensor) const { return made_[tensor].memory; }
  const std::vector<int64_t>& shape(size_t tensor) const { return made_[tensor].shape; }
  /// The other kind, once: brings it into `to`, which its owner has just made. The host waits until
  /// nobody uses that memory any more, since it may have been another array's. What is put into
  /// `stream` from now on finds it there; without one the host waits for that, too.
  void deliver(Group& world, size_t tensor, const DeviceSpan& to, std::optional<uint64_t> stream);

  std::byte* make_room(size_t tensor, std::span<const int64_t> shape) override;
  void finished(NamedRequest&) override {}  // somebody waits

 private:
  struct Made {
    std::shared_ptr<DeviceQueue> queue;  // null: the host
    size_t row_bytes = 0;                // of one in the first dimension
    size_t bytes = 0;                    // of all, when that is known
    std::shared_ptr<StagingBlock> block;
    std::shared_ptr<std::byte> memory;
    std::vector<int64_t> shape;
  };
  void stage_all(const NamedCall& call, const std::vector<PlacedTensor>& tensors);

  int rank_;
  std::shared_ptr<Staging> staging_;
  std::shared_ptr<StagedCopies> copies_;
  std::vector<NamedTensor> staged_;
  std::vector<Made> made_;  // by tensor
  std::map<int, size_t> outputs_;
  NamedRequest* request_ = nullptr;
};

}  // namespace farandole
