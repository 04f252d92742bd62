#include "stream/gates.h"

namespace farandole {

bool AllGates::is_open() {
  for (; opened_ < gates_.size(); ++opened_)
    if (!gates_[opened_]->is_open()) return false;
  return true;
}

std::shared_ptr<Gate> all_of(std::vector<std::shared_ptr<Gate>> gates) {
  if (gates.size() > 1) return std::make_shared<AllGates>(std::move(gates));
  return gates.empty() ? nullptr : std::move(gates.front());
}

}  // namespace farandole
