// An operation by name on arrays of devices: named at once, and begun when its arrays have come to
// the host. Tensors that are operations by themselves are reduced where they lie, if those of all
// ranks can be.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "devices/staged_operation.h"
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
  /// As Named::submit, whose listener and gate this is. `kept`: what keeps the arrays. A failure on
  /// this rank, but for a wrong argument, fails the world, since the others may be waiting.
  static std::shared_ptr<StagedNamed> submit(Group& world, Named& named, NamedCall call,
                                             const std::vector<PlacedTensor>& tensors,
                                             std::shared_ptr<const void> kept);
  StagedNamed(Group& world, std::shared_ptr<const void> kept);
  ~StagedNamed() override;

  NamedRequest* request() const { return request_; }
  /// Once the request has ended well: results are copied back, unless they are there.
  void take_back();
  /// The index of one output on each device that has any, by device.
  const std::map<int, size_t>& outputs() const { return outputs_; }
  /// Then: StagedCopies::hand_over.
  void hand_over(int device, std::optional<uint64_t> stream);

  /// Whether the result that was made for a tensor belongs on the host, as the tensor does.
  bool is_for_host(size_t tensor) const { return !made_[tensor].queue; }
  const std::shared_ptr<std::byte>& memory(size_t tensor) const { return made_[tensor].memory; }
  const std::vector<int64_t>& shape(size_t tensor) const { return made_[tensor].shape; }
  /// For a result on a device, once: copies it to `to`, which its owner has just made. The host
  /// waits until that memory is unused, since it may have been another array's. Later work in
  /// `stream` finds the result there; without a stream the host waits for it, too.
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
  void stage_all(Group& world, const Named& named, const NamedCall& call,
                 const std::vector<PlacedTensor>& tensors);
  Operand stage_alone(Group& world, const NamedCall& call, const PlacedOperand& tensor);

  int rank_;
  std::shared_ptr<Staging> staging_;
  std::shared_ptr<const void> kept_;
  std::shared_ptr<StagedCopies> copies_;  // of all but those that are alone
  std::vector<StagedOperation> alone_;
  std::vector<std::shared_ptr<Gate>> gates_;
  std::vector<NamedTensor> staged_;                     // by tensor
  std::vector<std::shared_ptr<OnDevices>> on_devices_;  // likewise
  std::vector<Made> made_;                              // by tensor
  std::map<int, size_t> outputs_;
  NamedRequest* request_ = nullptr;
};

}  // namespace farandole
