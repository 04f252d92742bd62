// Gradients on a device, reduced where they lie if those of all ranks can be; else in the buckets
// of the host: brought there as backward makes them, and brought back when the step's buckets are
// reduced.
//
//   bring()       copies after the work now in the owner's stream; a bucket's gate waits for one
//                 mark after all copies
//   take_back()   copies back; later work in the owner's stream comes after the copies
//
// The host waits for neither.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "devices/device_bucket.h"
#include "fusion/reducer.h"

namespace farandole {

/// Any thread, as Reducer has it.
class DeviceGradients : public Carrier, public std::enable_shared_from_this<DeviceGradients> {
 public:
  /// `carried`: by parameter, whether its gradients lie on this device; others' may lie on another
  /// one, in the same buckets. To be given to the reducer, which outlives it. Throws Error(device),
  /// which all ranks get, where the device cannot be used, and Error(invalid_argument) where NCCL
  /// was asked for and may not be.
  DeviceGradients(Reducer& reducer, int device, std::vector<bool> carried);
  ~DeviceGradients() override;
  DeviceGradients(const DeviceGradients&) = delete;
  DeviceGradients& operator=(const DeviceGradients&) = delete;

  Reducer& reducer() const { return reducer_; }
  /// In place of Reducer::mark_ready. `address`: contiguous elements, alive as long as `owner`.
  /// `stream`: in which they are being made.
  void bring(int parameter, uint64_t address, uint64_t stream, std::shared_ptr<const void> owner,
             int sparse_dims);
  /// After Reducer::wait(): returns the reduced gradients of these parameters, brought in this
  /// step, to their arrays. Later work in `stream` finds them there.
  void take_back(std::span<const int> parameters, uint64_t stream);

  bool carries(size_t parameter) const override { return carried_[parameter]; }
  Carried launch(size_t bucket) override;
  void let_go() override;

 private:
  /// A parameter's gradient in the present step.
  struct Home {
    uint64_t address = 0;
    uint64_t stream = 0;
    std::shared_ptr<const void> owner;  // until its bucket is launched
    bool brought = false;               // and its bucket is not launched
    bool copied = false;                // its copy to the host is on its way
  };
  struct BucketState {
    DevicePages pages;            // on the host; null: none of it was brought there yet
    bool on_device = false;       // all of its gradients are
    bool never_by_steps = false;  // steps declined it when they were tried
    uint64_t launches = 0;
    uint64_t next_try = 0;                     // the launch that may go by steps again
    std::shared_ptr<BucketOnDevice> by_steps;  // of the present step, unless it goes by the host
  };

  void look_at_buckets();
  void copy_to_host(const Placement& placement, size_t bucket);
  bool may_stay(const BucketState& state) const;
  static void try_later(BucketState& state);
  bool is_whole(const Bucket& bucket) const;
  std::shared_ptr<BucketOnDevice> leave_on_device(size_t bucket);
  std::shared_ptr<Gate> bring_to_host(size_t bucket);
  void go_by_host(size_t bucket, Operation& operation, BucketOnDevice& by_steps, bool mixed);
  void copy_back(std::span<const int> parameters, uint64_t stream);
  void wait_for_copies() noexcept;

  Reducer& reducer_;
  int device_;
  std::vector<bool> carried_;
  std::shared_ptr<Staging> staging_;
  std::shared_ptr<DeviceQueue> queue_;
  std::shared_ptr<Steps> steps_;  // null: all go by the host

  std::mutex mutex_;                  // guards the rest
  std::vector<BucketState> buckets_;  // by bucket
  std::vector<Home> homes_;           // by parameter
  std::optional<uint32_t> returned_;  // the mark behind what was copied back last
};

}  // namespace farandole
