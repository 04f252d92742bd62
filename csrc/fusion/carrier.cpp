#include "fusion/carrier.h"

#include <algorithm>
#include <utility>

#include "stream/gates.h"

namespace farandole {
bool Carriers::carries(size_t parameter) const {
  return std::ranges::any_of(all_, [&](const auto& one) { return one->carries(parameter); });
}

Carried Carriers::launch(size_t bucket) {
  Carried all;
  std::vector<std::shared_ptr<Gate>> gates;
  for (const auto& one : all_) {
    Carried carried = one->launch(bucket);
    if (carried.gate) gates.push_back(std::move(carried.gate));
    if (carried.on_devices) all.on_devices = std::move(carried.on_devices);  // has the bucket alone
  }
  all.gate = all_of(std::move(gates));
  return all;
}

void Carriers::let_go() {
  for (const auto& one : all_) one->let_go();
}

void Carriers::end() noexcept {
  for (const auto& one : all_) one->end();
}

}  // namespace farandole
