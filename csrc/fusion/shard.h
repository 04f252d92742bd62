// This rank's part of one bucket: the optimizer's state for it, and the use of its gradients once
// they are folded.
#pragma once

#include <memory>
#include <vector>

#include "fold/update.h"
#include "fusion/bucket_plan.h"
#include "stream/operation.h"

namespace farandole {

/// The next update of one parameter.
struct ParameterUpdate {
  bool skipped = true;  // no rank has a gradient: value and state stay as they are
  UpdateKind kind = UpdateKind::sgd;
  UpdateFactors factors;
};

/// The part of a bucket that one of `size` ranks owns, as mapped and reduce_scatter deal it out.
Slice part_of(const Bucket& bucket, int size, int rank);

/// As an epilogue: makes new parameters and new state of reduced gradients.
class Shard final : public Epilogue {
 public:
  /// Owns part_of(bucket, size, rank), with `slots` numbers of state for each of its elements, 0 at
  /// first.
  Shard(Bucket bucket, int size, int rank, size_t slots);

  const Bucket& bucket() const { return bucket_; }
  size_t first() const { return part_.offset; }
  size_t count() const { return part_.count; }
  size_t slots() const { return state_.size(); }
  std::byte* state(size_t slot) { return state_[slot].get(); }
  /// Zeros the state of a parameter.
  void reset(size_t parameter);
  size_t bytes() const { return part_.count * size_of(bucket_.dtype); }  // of one slot

  void apply(std::byte* result, const std::byte* reduced, size_t first, size_t count) override;

  std::vector<ParameterUpdate> updates;  // by item; set before an operation is launched

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };

  Bucket bucket_;
  Slice part_;
  std::vector<std::unique_ptr<std::byte, Free>> state_;
};

enum class Norm : uint8_t { two, infinite };

/// Looks at a shard's reduced gradients and stores nothing.
class PartNorm final : public Epilogue {
 public:
  PartNorm(std::shared_ptr<const Shard> shard, Norm norm) : shard_(std::move(shard)), norm_(norm) {}

  void apply(std::byte* result, const std::byte* reduced, size_t first, size_t count) override;
  bool stores() const override { return false; }

  /// Adds the term of one tile of one parameter; tiles come in order.
  void add(double term);
  /// The sum of squares, or the largest magnitude, of the gradients that are not skipped.
  double total() const { return total_; }

 private:
  std::shared_ptr<const Shard> shard_;
  Norm norm_;
  double total_ = 0;
};

}  // namespace farandole
