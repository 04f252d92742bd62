// Copies between a device and the host, on two streams of our own: what goes one way does not wait
// for what goes the other.
#pragma once

#include <cstdint>
#include <mutex>

#include "cuda/driver/completion.h"
#include "cuda/driver/event.h"

namespace farandole {

enum class CudaWay : uint8_t { to_host, to_device };
inline constexpr auto kToHost = CudaWay::to_host, kToDevice = CudaWay::to_device;

}  // namespace farandole

namespace farandole::cuda {

class CopyStreams {
 public:
  /// `doorbell`: rung when copies to the host come to a mark.
  CopyStreams(const std::shared_ptr<const DeviceContext>& context, int doorbell);

  const std::shared_ptr<const DeviceContext>& context() const { return context_; }
  const StreamRef& stream(CudaWay way) const { return way == kToHost ? to_host_ : to_device_; }

  uint32_t mark(CudaWay way);
  bool reached(CudaWay way, uint32_t number) const;
  /// Throws the context's lasting error.
  void look_for_loss() const;
  /// Copies to the host wait for what is in `stream` now.
  void follow(StreamHandle stream);
  /// Later work in `stream` waits for the copies to the device up to now.
  void precede(StreamHandle stream);

 private:
  StreamRef users(StreamHandle stream) const;
  void order(const StreamRef& earlier, const StreamRef& later);

  std::shared_ptr<const DeviceContext> context_;
  int doorbell_;
  std::mutex marking_;   // guards the counts' numbers
  std::mutex ordering_;  // guards event_, from its record to the wait for it
  CompletionCount arrived_, left_;
  DeviceEvent event_;
  DeviceStream to_host_, to_device_;  // last: their ends wait for what they do to the rest
};

}  // namespace farandole::cuda
