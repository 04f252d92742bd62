// A sharded update whose gradients and parameters lie on a device. A bucket of which all ranks have
// all on one device each is updated there, with its part of the optimizer's state; any other in the
// buckets of the host:
//
//   bring()         a gradient, as backward makes it: after the work now in its owner's stream
//   bring_value()   before an update: where a parameter is
//   arrive()        waits until all that goes by the host has arrived, and until the last results
//                   have left
//   take_back()     after an update: returns parameters; later work in their owner's stream comes
//                   after that
//
// The first update or norm of a bucket decides its path for good. For a norm the device computes
// terms, which are much smaller than the gradients, and the host adds them up in the order in which
// it would have made them.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "devices/device_update.h"
#include "devices/staging.h"
#include "fusion/sharded_update.h"

namespace farandole {

/// Used by one thread at a time, as the update is.
class DeviceShards : public ShardCarrier {
 public:
  /// `carried`: by parameter, whether it lies on this device. The update outlives it. `interrupted`
  /// is that of Group::wait_for. Throws Error(device), which all ranks get, where the device cannot
  /// be used.
  DeviceShards(ShardedUpdate& update, int device, std::vector<bool> carried,
               std::function<void()> interrupted);
  ~DeviceShards() override;
  DeviceShards(const DeviceShards&) = delete;
  DeviceShards& operator=(const DeviceShards&) = delete;

  /// `address`: contiguous elements, alive as long as `owner`. `stream`: in which they are made.
  void bring(size_t parameter, uint64_t address, uint64_t stream,
             std::shared_ptr<const void> owner);
  void bring_value(size_t parameter, uint64_t address, uint64_t stream);
  /// Before a norm: copies the gradients whose terms the host computes.
  void bring_all();
  /// Throws the group's verdict, and Error(stalled) after the group's timeout.
  void arrive();
  /// `values`: parameters that were updated, and their addresses. Later work in `stream` finds the
  /// new values there.
  void take_back(std::span<const std::pair<size_t, uint64_t>> values, uint64_t stream);

  std::shared_ptr<OnDevices> launch(size_t bucket, Shard& shard) override;
  std::shared_ptr<OnDevices> launch_norm(size_t bucket, const Shard& shard, Norm norm) override;
  /// Waits for the device.
  void finish_norm(size_t bucket, PartNorm& norm) override;
  void fetch_state(size_t bucket, Shard& shard) override;
  void replace_state(size_t bucket, Shard& shard) override;

 private:
  /// For operations in flight, which may outlive this: an interrupted step, say.
  struct Alive {
    std::mutex mutex;  // held while they use it
    DeviceShards* shards;
  };
  /// A parameter: where its gradient is, and itself.
  struct Home {
    size_t bucket = 0, offset = 0, count = 0, element = 0;  // the offset in bytes
    uint64_t gradient = 0, value = 0;                       // addresses; 0: none in this step
    uint64_t gradient_stream = 0, value_stream = 0;         // in which they are made
    std::shared_ptr<const void> owner;                      // of the gradient
    bool copied = false;                                    // to the host
  };
  struct BucketState {
    DevicePages gradients, values;  // on the host; null: not registered yet
    bool stays = false;             // on the device, unless other ranks' do not
    std::vector<DeviceRoom> state;  // of this rank's part, by slot; none: the host has it
    std::shared_ptr<DeviceUpdate> newest;
    DeviceRoom terms;  // of a norm
    size_t most_terms = 0, new_terms = 0;
    std::shared_ptr<DeviceUpdate> norm;  // under way
  };

  const DevicePages& pages(DevicePages& known, std::byte* memory, size_t bucket);
  Slice mine(size_t bucket) const;
  void copy_gradient(Home& home);
  void copy_value(const Home& home);
  void go_by_host(size_t bucket, Operation& operation);
  std::shared_ptr<DeviceUpdate> make_update(size_t bucket);
  uint64_t gradient_of(size_t parameter, DeviceUpdate& made);
  size_t terms_of(size_t bucket, const Placement& at) const;
  bool takes_norm(size_t bucket) const;
  void make_state(size_t bucket, Shard& shard);
  void copy_state(size_t bucket, Shard& shard, CudaWay way);
  uint64_t zeros(size_t bytes);
  void let_go(std::shared_ptr<const void> owner);

  ShardedUpdate& update_;
  std::function<void()> interrupted_;
  std::shared_ptr<Staging> staging_;
  std::shared_ptr<DeviceQueue> queue_;
  std::shared_ptr<Steps> steps_;  // null: all go by the host
  std::shared_ptr<Alive> alive_ = std::make_shared<Alive>();
  std::vector<Home> homes_;           // by parameter
  std::vector<BucketState> buckets_;  // by bucket
  DeviceRoom zeros_;                  // in place of gradients that only other ranks have
  size_t zero_bytes_ = 0;
  bool arriving_ = false, returning_ = false;
};

}  // namespace farandole
