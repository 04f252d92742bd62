// One bucket of gradients that lie on a device, in one step: brought to the host's memory, which
// waits for them there, or reduced where they lie.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "devices/staging.h"
#include "devices/steps.h"
#include "fusion/bucket_plan.h"

namespace farandole {

/// What the bucket on the host waits for: its gradients have come, were prescaled, and zeros stand
/// for those that there are not.
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

/// A bucket that goes by steps where those of all ranks do.
class BucketOnDevice : public OnDevices {
 public:
  /// Begins to bring it to the host, and makes that what the operation waits for. By the thread
  /// that polls. `mixed`: other ranks' lie elsewhere; else it went by no steps on any rank.
  using ToHost = std::function<void(Operation& operation, BucketOnDevice& bucket, bool mixed)>;

  /// `prescale`: of what shares a bucket, which the operation says nothing of.
  BucketOnDevice(std::shared_ptr<Steps> steps, double prescale, ToHost to_host);

  /// Gradients in the order of the bucket, and all of them. `stream`: in which they are made.
  void add(const Bucket& bucket, const Placement& at, uint64_t address, uint64_t stream,
           std::shared_ptr<const void> owner);
  /// They are made in streams that this queue follows.
  void seal(const DeviceQueue& queue);

  Backend& backend() override;
  std::shared_ptr<PiecesOnDevices> go_by_host(Operation& operation, size_t piece) override;

  /// Whether it went by steps; once the operation is complete on the host.
  bool launched() const { return arrays_.launched.load(std::memory_order_acquire); }
  /// Then: Steps::hand_over.
  void hand_over(uint64_t stream) { steps_->hand_over(arrays_, stream); }
  /// What is put into `stream` from now on comes after the operation: lets go of gradients whose
  /// memory is used there next.
  void let_go(uint64_t stream);
  /// Gradients' owners, in order, once: they go by the host after all.
  std::vector<std::shared_ptr<const void>> take_owners();

 private:
  using Owners = std::vector<std::shared_ptr<const void>>;

  std::shared_ptr<Steps> steps_;
  ToHost to_host_;
  std::weak_ptr<Owners> owners_;  // arrays_ keeps them, and who watches the operation
  std::set<uint64_t> streams_;    // in which gradients are made
  StepArrays arrays_;
};

}  // namespace farandole
