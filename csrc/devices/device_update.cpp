#include "devices/device_update.h"

#include <utility>

namespace farandole {

DeviceUpdate::DeviceUpdate(std::shared_ptr<Steps> steps, ToHost to_host)
    : steps_(std::move(steps)),
      to_host_(std::move(to_host)),
      used_(std::make_shared<std::vector<std::shared_ptr<const void>>>()) {
  arrays_.kept = used_;
}

void DeviceUpdate::add(const Bucket& bucket, const Placement& at, const ParameterUpdate& update,
                       uint64_t gradient, uint64_t value, const uint64_t (&state)[kMostSlots]) {
  if (at.count == 0) return;
  add(bucket, at, gradient);
  const size_t element = size_of(bucket.dtype);
  arrays_.outputs.skip_to(at.offset * element);
  arrays_.outputs.add(value, at.count * element);
  StepUpdate& added = arrays_.updates.back();
  added.value = value;
  std::ranges::copy(state, added.state);
  added.kind = update.kind;
  added.factors = update.factors;
}

void DeviceUpdate::add(const Bucket& bucket, const Placement& at, uint64_t gradient) {
  if (at.count == 0) return;
  const size_t element = size_of(bucket.dtype);
  arrays_.inputs.skip_to(at.offset * element);
  arrays_.inputs.add(gradient, at.count * element);
  arrays_.updates.emplace_back().whole = {Space::input, at.offset, at.count};
}

Backend& DeviceUpdate::backend() {
  steps_->backend().take(arrays_);
  return steps_->backend();
}

}  // namespace farandole
