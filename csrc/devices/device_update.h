// One bucket of a sharded update on a device: gradients are folded where all ranks map them, each
// rank updates its part of the parameters where they lie, with the state that it has there, and
// the others read the new values. Where the bucket goes by the host after all, it is brought there.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "devices/steps.h"
#include "fusion/shard.h"

namespace farandole {

class DeviceUpdate : public OnDevices {
 public:
  /// Starts the copies to the host, and makes them the operation's gate. By the thread that polls.
  using ToHost = std::function<void(Operation& operation)>;

  DeviceUpdate(std::shared_ptr<Steps> steps, ToHost to_host);

  /// A parameter, in the order of the bucket. `state`: addresses of this rank's part of the
  /// bucket's. Gradient and value lie contiguous.
  void add(const Bucket& bucket, const Placement& at, const ParameterUpdate& update,
           uint64_t gradient, uint64_t value, const uint64_t (&state)[kMostSlots]);
  /// Adds a parameter of a norm, which needs its gradient alone.
  void add(const Bucket& bucket, const Placement& at, uint64_t gradient);
  /// Makes it a norm: `terms`, an array of doubles, gets one term for each tile.
  void take_norm(uint64_t terms, bool largest) { arrays_.norm = {terms, largest}; }
  /// Keeps an object that it uses until it is complete on the device.
  void keep(std::shared_ptr<const void> used) { used_->push_back(std::move(used)); }
  /// Waits for the work now in `stream`, in which a gradient or a value is made.
  void follow(uint64_t stream) { streams_.insert(stream); }
  bool empty() const { return arrays_.updates.empty(); }
  /// Once all are added.
  void seal() { arrays_.moments = steps_->moments(streams_); }

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
  std::set<uint64_t> streams_;
  StepArrays arrays_;
};

}  // namespace farandole
