// Gradients on a device, reduced where they lie if those of all ranks can be; else in the buckets
// of the host: brought there as backward makes them, and brought back when the step's buckets are
// reduced.
//
//   bring()       copies after the work now in the owner's stream
//   take_back()   copies back; later work in the owner's stream comes after the copies
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "devices/device_carrier.h"
#include "fusion/reducer.h"

namespace farandole {

/// Any thread, as Reducer has it.
class DeviceGradients final : public DeviceCarrier {
 public:
  /// Throws Error(invalid_argument) where NCCL was asked for and may not be.
  DeviceGradients(Reducer& reducer, int device, std::vector<bool> carried);
  ~DeviceGradients() override { wait_for_copies(); }

  /// In place of Reducer::mark_ready. `address`: contiguous elements, alive as long as `owner`.
  /// `stream`: in which they are being made.
  void bring(int parameter, uint64_t address, uint64_t stream, std::shared_ptr<const void> owner,
             int sparse_dims);
  /// After Reducer::wait(): returns the reduced gradients of these parameters, brought in this
  /// step, to their arrays. Later work in `stream` finds them there.
  void take_back(std::span<const int> parameters, uint64_t stream);

  void let_go() override;

 private:
  struct BucketState {
    bool on_device = false;       // all of its gradients are
    bool never_by_steps = false;  // steps declined it when they were tried
    uint64_t launches = 0;
    uint64_t next_try = 0;                     // the launch that may go by steps again
    std::shared_ptr<BucketOnDevice> by_steps;  // of the present step, unless it goes by the host
  };

  void look_at_buckets();
  bool may_stay(const BucketState& state) const;
  static void try_later(BucketState& state);
  bool is_whole(const Bucket& bucket) const;
  std::shared_ptr<BucketOnDevice> leave_on_device(size_t bucket) override;
  void give_up(size_t bucket, BucketOnDevice& by_steps, bool mixed) override;
  std::shared_ptr<Gate> bring_to_host(size_t bucket) override;
  void copy_back(std::span<const int> parameters, uint64_t stream);

  Reducer& reducer_;
  std::vector<BucketState> buckets_;  // by bucket; guarded by the mutex
};

}  // namespace farandole
