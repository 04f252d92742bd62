// A sharded update whose gradients and parameters lie on a device. A bucket of which all ranks have
// all on one device each is updated there, with its part of the optimizer's state; any other in the
// buckets of the host:
//
//   bring()         a gradient, as backward makes it: after the work now in its owner's stream
//   bring_value()   before an update: where a parameter is
//   take_back()     after an update: returns parameters; later work in their owner's stream comes
//                   after that
//
// The first update or norm of a bucket decides its path for good. For a norm the device computes
// terms, which are much smaller than the gradients, and the host adds them up in the order in which
// it would have made them.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "devices/device_carrier.h"
#include "fusion/sharded_update.h"

namespace farandole {

/// Used by one thread at a time, as the update is.
class DeviceShards final : public DeviceCarrier, public ShardCarrier {
 public:
  DeviceShards(ShardedUpdate& update, int device, std::vector<bool> carried);
  ~DeviceShards() override { wait_for_copies(); }

  /// `address`: contiguous elements, alive as long as `owner`. `stream`: in which they are made.
  void bring(size_t parameter, uint64_t address, uint64_t stream,
             std::shared_ptr<const void> owner);
  void bring_value(size_t parameter, uint64_t address, uint64_t stream);
  /// `values`: parameters that were updated, and their addresses. Later work in `stream` finds the
  /// new values there.
  void take_back(std::span<const std::pair<size_t, uint64_t>> values, uint64_t stream);

  /// Waits for the device.
  void finish_norm(size_t bucket, PartNorm& norm) override;
  void fetch_state(size_t bucket, Shard& shard) override;
  void replace_state(size_t bucket, Shard& shard) override;
  void let_go() override {}  // the buckets stay

 private:
  struct Value {
    uint64_t address = 0, stream = 0;
  };
  struct BucketState {
    DevicePages values;             // on the host; null: not registered yet
    bool stays = false;             // on the device, unless other ranks' do not
    std::vector<DeviceRoom> state;  // of this rank's part, by slot; none: the host has it
    std::shared_ptr<BucketOnDevice> newest;
    DeviceRoom terms;  // of a norm
    size_t most_terms = 0, new_terms = 0;
    std::shared_ptr<BucketOnDevice> norm;  // under way
  };

  const DevicePages& value_pages(size_t bucket);
  Slice mine(size_t bucket) const;
  void copy_value(const Placement& placement, size_t bucket);
  std::shared_ptr<BucketOnDevice> leave_on_device(size_t bucket) override;
  void give_up(size_t bucket, BucketOnDevice& on_device, bool mixed) override;
  std::shared_ptr<Gate> bring_to_host(size_t bucket) override;
  void release_pages() override;
  std::shared_ptr<BucketOnDevice> update_there(size_t bucket);
  std::shared_ptr<BucketOnDevice> norm_there(size_t bucket);
  uint64_t gradient_of(const Placement& placement, size_t bucket, BucketOnDevice& made);
  size_t terms_of(size_t bucket, const Placement& at) const;
  bool takes_norm(size_t bucket) const;
  void make_state(size_t bucket, Shard& shard);
  void copy_state(size_t bucket, Shard& shard, CudaWay way);
  uint64_t zeros(size_t bytes);

  ShardedUpdate& update_;
  std::vector<Value> values_;         // by parameter
  std::vector<BucketState> buckets_;  // by bucket; guarded by the mutex
  DeviceRoom zeros_;                  // in place of gradients that only other ranks have
  size_t zero_bytes_ = 0;
};

}  // namespace farandole
