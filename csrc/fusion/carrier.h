// Gradients that this rank's processor cannot read where they lie, on their way into buckets.
#pragma once

#include <cstddef>
#include <memory>

#include "stream/operation.h"

namespace farandole {

/// Who brings them. A reducer has one at most, and keeps it.
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

}  // namespace farandole
