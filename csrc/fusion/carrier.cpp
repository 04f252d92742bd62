#include "fusion/carrier.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

/// Open when all of these are.
class AllOf : public Gate {
 public:
  explicit AllOf(std::vector<std::shared_ptr<Gate>> shut) : shut_(std::move(shut)) {}

  bool is_open() override {
    std::erase_if(shut_, [](const auto& gate) { return gate->is_open(); });
    return shut_.empty();
  }
  std::string awaited() const override {
    std::string text;
    for (const auto& gate : shut_) text += (text.empty() ? "" : ", ") + gate->awaited();
    return text;
  }

 private:
  std::vector<std::shared_ptr<Gate>> shut_;
};

}  // namespace

bool Carriers::carries(size_t parameter) const {
  return std::ranges::any_of(all_, [&](const auto& one) { return one->carries(parameter); });
}

std::shared_ptr<Gate> Carriers::launch(size_t bucket) {
  std::vector<std::shared_ptr<Gate>> gates;
  for (const auto& one : all_)
    if (auto gate = one->launch(bucket)) gates.push_back(std::move(gate));
  if (gates.size() > 1) return std::make_shared<AllOf>(std::move(gates));
  return gates.empty() ? nullptr : std::move(gates.front());
}

void Carriers::let_go() {
  for (const auto& one : all_) one->let_go();
}

}  // namespace farandole
