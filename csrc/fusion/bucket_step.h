// The common part of all training steps by buckets: a stream of their own, operations in flight on
// it, ranks that give the step up, and the comparison of weights.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fusion/bucket_plan.h"
#include "fusion/weights.h"
#include "group/group.h"

namespace farandole {

/// Where a parameter's elements lie: a bucket, and bytes from its begin.
struct BucketPlace {
  size_t bucket = 0;
  size_t offset = 0;
};
/// By parameter.
std::vector<BucketPlace> places_of(const std::vector<Bucket>& buckets, size_t parameters);

/// Used by its owner, one thread at a time.
class BucketStep {
 public:
  BucketStep(std::shared_ptr<Group> group, std::string label);
  /// Buckets may still be written to; their memory outlives the operations in flight.
  ~BucketStep();
  BucketStep(const BucketStep&) = delete;
  BucketStep& operator=(const BucketStep&) = delete;

  Group& group() const { return *group_; }
  const std::string& label() const { return label_; }
  const std::shared_ptr<Stream>& stream() const { return stream_; }

  /// The step is shown in the trace from the first open() to close().
  void open() { trace_.open(group_->engine()->trace()); }
  void close() { trace_.close(); }

  /// Submits a collective; `memory` is held until it has ended.
  void launch(const std::string& name, Options what, Buffer input, Buffer output,
              std::shared_ptr<const void> memory);
  /// The same for the largest of all ranks' elements, in place.
  template <typename T>
  void launch_max(const std::string& name, const std::shared_ptr<std::vector<T>>& elements,
                  DType dtype) {
    const Buffer all{reinterpret_cast<std::byte*>(elements->data()), elements->size(), dtype};
    launch(name, CollectiveSpec{Collective::all_reduce, ReduceOp::max}, all, all, elements);
  }
  /// Drives until nothing is in flight; false when `until` passes first. The first error goes to
  /// `first`, unless one stands there.
  bool wait(Deadline until, std::optional<Error>& first);
  /// wait() will not wait.
  bool over() const { return in_flight_.empty() || in_flight_.back().done(); }  // they run in order

  static constexpr uint8_t kAbandoned = 1;
  /// World ranks whose flag, by rank, is kAbandoned.
  std::vector<int> quitters(const uint8_t* flags) const;
  /// Throws RemoteError: "`what` was abandoned on ranks …; `so`".
  [[noreturn]] void refuse(const std::vector<int>& quitters, const std::string& what,
                           const std::string& so) const;

  // ---- weights ----

  void watch(WeightsWatch watch) { weights_ = std::move(watch); }
  bool weights_due() const { return weights_.due(); }
  void show_weights(std::vector<uint64_t> checksums) { weights_.show(std::move(checksums)); }
  void launch_weights();
  /// After wait(): how they differ.
  std::optional<Error> judge_weights() { return weights_.judge(*group_); }
  /// The step is over, on all ranks.
  void step_taken() { weights_.step_taken(); }

 private:
  std::shared_ptr<Group> group_;
  std::string label_;
  std::shared_ptr<Stream> stream_;
  TraceSteps trace_;
  WeightsWatch weights_;
  std::vector<Handle> in_flight_;
};

}  // namespace farandole
