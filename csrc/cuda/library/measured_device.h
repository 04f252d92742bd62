// A device while it is measured: a stream, arrays of one number, and times.
#pragma once

#include <functional>
#include <memory>

#include "base/dtype.h"
#include "cuda/driver/event.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"

namespace farandole::cuda {

/// Exact in each dtype, and so are small multiples of it.
inline constexpr float kMeasuredNumber = 1.5;

struct MeasuredArray {
  std::unique_ptr<DeviceMemory> memory;
  uint64_t bytes;
  DevicePointer at() const { return memory->address(); }
};

class MeasuredDevice {
 public:
  /// With the kernels; throws Error(device) where there are none.
  explicit MeasuredDevice(int ordinal);

  const std::shared_ptr<const DeviceContext>& context() const { return context_; }
  const StreamRef& stream() const { return stream_; }
  uint32_t multiprocessors() const;
  DeviceFunction function(const std::string& name) const { return module_->function(name); }

  /// Full of one number, once the stream comes by. Of float32 or bfloat16; whole words.
  MeasuredArray array(uint64_t bytes, DType dtype, float value) const;
  /// Waits for the stream.
  bool is_full_of(const MeasuredArray& array, DType dtype, float value) const;

  /// By the device's clock, from what `launch` puts behind the stream to what the stream waits for
  /// afterwards, in seconds.
  double seconds_of(const std::function<void()>& launch);
  /// Seconds of a round, in the best of a few batches of so many: others may use the device, too.
  double best_round(int rounds, const std::function<void()>& round);

 private:
  std::shared_ptr<const DeviceContext> context_;
  std::shared_ptr<const DeviceModule> module_;
  DeviceEvent begin_, end_;
  DeviceStream stream_;
};

}  // namespace farandole::cuda
