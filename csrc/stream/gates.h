// Several gates as one.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stream/operation.h"

namespace farandole {

/// Open when all of these are.
class AllGates : public Gate {
 public:
  explicit AllGates(std::vector<std::shared_ptr<Gate>> gates) : gates_(std::move(gates)) {}

  bool is_open() override;
  /// The answer of the first gate that is shut.
  std::string awaited() const override { return gates_[opened_]->awaited(); }

 private:
  std::vector<std::shared_ptr<Gate>> gates_;
  size_t opened_ = 0;
};

/// One that is open when all of these are; null where there are none.
std::shared_ptr<Gate> all_of(std::vector<std::shared_ptr<Gate>> gates);

}  // namespace farandole
