// What the carriers of a device share, whatever becomes of the gradients: where these lie, copies
// to the buckets of the host and back, and the choice between host and device.
//
// The host waits for no copy: a bucket's gate waits for one mark after all of them.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "devices/device_bucket.h"
#include "fusion/bucket_step.h"

namespace farandole {

class DeviceCarrier : public Carrier, public std::enable_shared_from_this<DeviceCarrier> {
 public:
  DeviceCarrier(const DeviceCarrier&) = delete;
  DeviceCarrier& operator=(const DeviceCarrier&) = delete;

  bool carries(size_t parameter) const override { return carried_[parameter]; }
  Carried launch(size_t bucket) override;
  void end() noexcept override;

 protected:
  /// A parameter's gradient.
  struct Home {
    uint64_t address = 0;
    uint64_t stream = 0;  // in which it is made
    std::shared_ptr<const void> owner;
    bool brought = false;  // in the present step
    bool copied = false;   // its copy to the host is on its way
  };

  /// `carried`: by parameter, whether its gradients lie on this device; others' may lie on another
  /// one, in the same buckets. `step` outlives it, and has it as a carrier. Throws Error(device),
  /// which all ranks get, where the device cannot be used.
  DeviceCarrier(BucketStep& step, int device, std::vector<bool> carried);

  /// Makes steps_, except where a setting rules them out, or gradients of another device of this
  /// rank have them. `without_buckets`: NCCL may do, where devices share no buckets.
  void open_steps(bool without_buckets);
  bool has_all_of(const Bucket& bucket) const;
  const DevicePages& pages(DevicePages& known, std::byte* memory, size_t bucket);
  void copy_gradient(const Placement& placement, size_t bucket);
  /// What was copied back last leaves the host before a bucket is used again, and is in its array
  /// before later work in `stream`.
  void note_returned(uint64_t stream);
  /// Before pages and rooms go.
  void wait_for_copies() noexcept;
  std::shared_ptr<BucketOnDevice> make_on_device(size_t bucket);

  /// How a bucket that is launched goes on the device; null: by the host.
  virtual std::shared_ptr<BucketOnDevice> leave_on_device(size_t bucket) = 0;
  /// It goes by the host after all. `mixed`: see BucketOnDevice::ToHost.
  virtual void give_up(size_t bucket, BucketOnDevice& on_device, bool mixed) = 0;
  /// Starts the copies of a bucket to the host. Returns the gate that waits for them, and for
  /// others if `more` were started.
  virtual std::shared_ptr<Gate> bring_to_host(size_t bucket) = 0;
  std::shared_ptr<Gate> bring_gradients(size_t bucket, bool more);
  /// Unregisters memory of the step that its owner is about to free.
  virtual void release_pages();

  BucketStep& step_;  // until end()
  const int rank_;    // in the world
  const int device_;
  const std::vector<bool> carried_;
  const std::shared_ptr<Staging> staging_;
  const std::shared_ptr<DeviceQueue> queue_;
  std::shared_ptr<Steps> steps_;  // null: all go by the host

  std::mutex mutex_;                  // guards the rest
  std::vector<Home> homes_;           // by parameter
  std::vector<DevicePages> pages_;    // by bucket; null: none of it was brought there yet
  std::optional<uint32_t> returned_;  // the mark behind what was copied back last
  bool ended_ = false;

 private:
  void go_by_host(size_t bucket, Operation& operation, BucketOnDevice& on_device, bool mixed);
};

}  // namespace farandole
