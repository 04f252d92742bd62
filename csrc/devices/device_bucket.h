// One bucket of gradients on a device, in one training step: copied to the host and used there, or
// used on the device.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "devices/staging.h"
#include "devices/steps.h"
#include "fusion/shard.h"

namespace farandole {

/// The gate of a bucket on the host. It opens once the gradients have arrived and are prescaled,
/// with zeros for missing ones.
class BucketArrival : public Gate {
 public:
  BucketArrival(std::shared_ptr<Staging> staging, std::shared_ptr<DeviceQueue> queue, int rank,
                DType dtype, double prescale)
      : staging_(std::move(staging)),
        queue_(std::move(queue)),
        rank_(rank),
        dtype_(dtype),
        prescale_(prescale) {}
  ~BucketArrival() override;

  void add(std::byte* place, size_t count, bool brought, std::shared_ptr<const void> owner);
  void open_after(const CopiesUntil& until) { until_ = until; }

  bool is_open() override;
  std::string awaited() const override;

 private:
  struct Slot {
    std::byte* place;
    size_t count;
    bool brought;
  };
  void fill(const Slot& slot) const;
  void look_for_loss();

  std::shared_ptr<Staging> staging_;
  std::shared_ptr<DeviceQueue> queue_;
  int rank_;
  DType dtype_;
  double prescale_;
  std::vector<Slot> slots_;
  std::vector<std::shared_ptr<const void>> owners_;
  CopiesUntil until_{.lost = true};
  LossWatch watch_;
  bool is_open_ = false;
};

/// A bucket that goes by steps where those of all ranks do: reduced in place; or its parameters are
/// updated, each rank's part where it lies, with the state that it has there; or it is a norm.
class BucketOnDevice : public OnDevices {
 public:
  /// Starts the copies to the host, and makes them the operation's gate. By the thread that polls.
  /// `mixed`: some rank has the bucket elsewhere; else steps can run it on no rank.
  using ToHost = std::function<void(Operation& operation, BucketOnDevice& bucket, bool mixed)>;

  BucketOnDevice(std::shared_ptr<Steps> steps, ToHost to_host);

  /// Makes it a reduction. `prescale`: the factor on gradients of a shared bucket, which the
  /// operation does not have.
  void reduce_in_place(double prescale);
  /// Makes it a norm: `terms`, an array of doubles, gets one term for each tile.
  void take_norm(uint64_t terms, bool largest) { arrays_.norm = {terms, largest}; }

  // In the order of the bucket; gradients and values lie contiguous.

  /// Adds a gradient that is reduced.
  void add(const Bucket& bucket, const Placement& at, uint64_t gradient);
  /// Adds a gradient that a norm needs.
  void look_at(const Bucket& bucket, const Placement& at, uint64_t gradient);
  /// Adds a parameter that is updated. `state`: addresses of this rank's part of the bucket's.
  void update(const Bucket& bucket, const Placement& at, const ParameterUpdate& update,
              uint64_t gradient, uint64_t value, const uint64_t (&state)[kMostSlots]);
  bool updates_none() const { return arrays_.updates.empty(); }

  /// Waits for the work now in `stream`, in which a gradient or a value is made.
  void follow(uint64_t stream) { streams_.insert(stream); }
  /// Keeps what it uses until it is complete on the device.
  void keep(std::shared_ptr<const void> owner) { owners_.lock()->push_back(std::move(owner)); }
  /// Once all are added.
  void seal() { arrays_.moments = steps_->moments(streams_); }

  Backend& backend() override;
  std::shared_ptr<PiecesOnDevices> go_by_host(Operation& operation, size_t piece) override;

  /// Whether it went by steps; once the operation is complete on the host.
  bool launched() const { return arrays_.launched.load(std::memory_order_acquire); }
  /// Then: Steps::hand_over.
  void hand_over(std::optional<uint64_t> stream) { steps_->hand_over(arrays_, stream); }
  /// Releases what it keeps if all was made in `stream`, whose later work comes after the
  /// operation.
  void let_go(uint64_t stream);
  /// What it keeps, in order, once: for gradients that go by the host after all.
  std::vector<std::shared_ptr<const void>> take_owners();

 private:
  using Owners = std::vector<std::shared_ptr<const void>>;

  std::shared_ptr<Steps> steps_;
  ToHost to_host_;
  std::weak_ptr<Owners> owners_;  // kept by arrays_, and by the watch of the operation
  std::set<uint64_t> streams_;
  StepArrays arrays_;
};

}  // namespace farandole
