// One bucket of a sharded update on a device: gradients are folded where all ranks map them, each
// rank updates its part of the parameters where they lie, with the state that it has there, and
// the others read the new values. Where the bucket goes by the host after all, it is brought there.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "devices/steps.h"
#include "fusion/shard.h"

namespace farandole {

class DeviceUpdate : public OnDevices {
 public:
  /// Begins to bring it to the host, and makes that what the operation waits for. By the thread
  /// that polls.
  using ToHost = std::function<void(Operation& operation)>;

  DeviceUpdate(std::shared_ptr<Steps> steps, ToHost to_host);

  /// A parameter, in the order of the bucket. `state`: addresses of this rank's part of the
  /// bucket's. Gradient and value lie contiguous.
  void add(const Bucket& bucket, const Placement& at, const ParameterUpdate& update,
           uint64_t gradient, uint64_t value, const uint64_t (&state)[kMostSlots]);
  /// Of a norm alone, a parameter of which only the gradient counts.
  void add(const Bucket& bucket, const Placement& at, uint64_t gradient);
  /// Then: `terms`, of doubles, gets what becomes of the tiles.
  void take_norm(uint64_t terms, bool largest) { arrays_.norm = {terms, largest}; }
  /// What it uses until it is complete on the device.
  void keep(std::shared_ptr<const void> used) { used_->push_back(std::move(used)); }
  bool empty() const { return arrays_.updates.empty(); }
  /// Its arrays are made in streams that this queue follows.
  void seal(const DeviceQueue& queue);

  Backend& backend() override;
  std::shared_ptr<PiecesOnDevices> go_by_host(Operation& operation, size_t) override {
    to_host_(operation);
    return nullptr;
  }

  /// Whether it went so; once the operation is complete on the host.
  bool launched() const { return arrays_.launched.load(std::memory_order_acquire); }
  /// Then: Steps::hand_over.
  void hand_over(std::optional<uint64_t> stream) { steps_->hand_over(arrays_, stream); }

 private:
  std::shared_ptr<Steps> steps_;
  ToHost to_host_;
  std::shared_ptr<std::vector<std::shared_ptr<const void>>> used_;
  StepArrays arrays_;
};

}  // namespace farandole
