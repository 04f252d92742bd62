#include "fusion/ready_order.h"

#include <algorithm>
#include <numeric>

namespace farandole {

void ReadyOrder::begin() {
  if (agreed_) return;
  next_ = 0;
  std::fill(positions_->begin(), positions_->end(), static_cast<int32_t>(positions_->size()));
}

void ReadyOrder::yield() {
  if (!agreed_) std::fill(positions_->begin(), positions_->end(), 0);
}

std::vector<int> ReadyOrder::agree() {
  agreed_ = true;
  std::vector<int> order(positions_->size());
  std::iota(order.begin(), order.end(), 0);
  // Ties keep the order of the parameters, which is the same on every rank.
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return (*positions_)[static_cast<size_t>(a)] < (*positions_)[static_cast<size_t>(b)];
  });
  return order;
}

}  // namespace farandole
