// Gradients on a device, reduced in the buckets of the host: brought there as backward makes them,
// and brought back when the step's buckets are reduced.
//
//   bring()       behind what its owner's stream does now; a bucket's gate has one mark behind all
//   take_back()   to where they came from; what its owner's stream does next comes after it
//
// The host waits for neither way.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "devices/staging.h"
#include "fusion/reducer.h"

namespace farandole {

/// Any thread, as Reducer has it.
class DeviceGradients : public Carrier {
 public:
  /// `carried`: by parameter, whether its gradients lie on this device; others' may lie on another
  /// one, in the same buckets. To be given to the reducer, which outlives it. Throws Error(device),
  /// which all ranks get, where the device cannot be used.
  DeviceGradients(Reducer& reducer, int device, std::vector<bool> carried);
  ~DeviceGradients() override;
  DeviceGradients(const DeviceGradients&) = delete;
  DeviceGradients& operator=(const DeviceGradients&) = delete;

  Reducer& reducer() const { return reducer_; }
  /// In place of Reducer::mark_ready. `address`: contiguous elements, alive as long as `owner`.
  /// `stream`: in which they are being made.
  void bring(int parameter, uint64_t address, uint64_t stream, std::shared_ptr<const void> owner,
             int sparse_dims);
  /// After Reducer::wait(): the reduced gradients of these, which were brought in this step, go to
  /// where they came from. What is put into `stream` from now on finds them there.
  void take_back(std::span<const int> parameters, uint64_t stream);

  bool carries(size_t parameter) const override { return carried_[parameter]; }
  std::shared_ptr<Gate> launch(size_t bucket) override;
  void let_go() override;

 private:
  class Arrival;
  const DevicePages& pages_of(size_t bucket);
  void wait_for_copies() noexcept;

  Reducer& reducer_;
  std::vector<bool> carried_;
  std::shared_ptr<Staging> staging_;
  std::shared_ptr<DeviceQueue> queue_;

  std::mutex mutex_;                // guards the rest
  std::vector<DevicePages> pages_;  // by bucket; null: none of it was brought yet
  struct Home {
    uint64_t address = 0;
    std::shared_ptr<const void> owner;  // until its bucket is launched
    bool brought = false;               // and its bucket not launched
  };
  std::vector<Home> homes_;           // by parameter
  std::optional<uint32_t> returned_;  // the mark behind what was brought back last
};

}  // namespace farandole
