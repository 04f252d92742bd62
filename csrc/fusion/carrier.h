// Gradients that this rank's processor cannot read where they lie, on their way into buckets.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "stream/operation.h"

namespace farandole {

/// Who brings them. A reducer keeps its carriers.
class Carrier {
 public:
  virtual ~Carrier() = default;
  /// Whether it brings this parameter's gradients. Then nobody else writes to their place in the
  /// bucket between two launches: what it brought back from there may still be on its way.
  virtual bool carries(size_t parameter) const = 0;
  /// All of this step's gradients of a bucket are on their way. What the bucket waits for: they
  /// have come, were prescaled, and zeros stand for those that there are not. Null where none of
  /// its parameters is carried. Under the reducer's lock.
  virtual std::shared_ptr<Gate> launch(size_t bucket) = 0;
  /// The buckets go, and others come in their place. While nothing of a step is in flight.
  virtual void let_go() = 0;
};

/// Several, of which no two carry one parameter; a bucket may have parameters of many.
class Carriers : public Carrier {
 public:
  void add(std::shared_ptr<Carrier> carrier) { all_.push_back(std::move(carrier)); }

  bool carries(size_t parameter) const override;
  std::shared_ptr<Gate> launch(size_t bucket) override;
  void let_go() override;

 private:
  std::vector<std::shared_ptr<Carrier>> all_;
};

}  // namespace farandole
