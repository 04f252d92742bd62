// The common part of all training steps by buckets: the plan, agreed on by all ranks; memory, and
// carriers into it; a stream of their own with operations in flight; what ranks tell each other in
// a step, and which of them give it up; the comparison of weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fusion/bucket_plan.h"
#include "fusion/carrier.h"
#include "fusion/step_flags.h"
#include "fusion/weights.h"
#include "group/group.h"

namespace farandole {

/// Where a parameter's elements lie: a bucket, and bytes from its begin.
struct BucketPlace {
  size_t bucket = 0;
  size_t offset = 0;
};

struct BucketOptions {
  ReduceOp op = ReduceOp::mean;
  double prescale = 1;
  double postscale = 1;
  BucketLimits limits;
  std::string label = "gradients";
};

class BucketStep {
 public:
  virtual ~BucketStep() = default;
  BucketStep(const BucketStep&) = delete;
  BucketStep& operator=(const BucketStep&) = delete;

  Group& group() const { return *group_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const std::vector<BucketPlace>& places() const { return places_; }  // by parameter
  const std::shared_ptr<Stream>& stream() const { return stream_; }
  /// The gradients' memory, which all ranks map. That of a tensor alone is allocated when first
  /// requested: a copy may never be needed.
  const std::shared_ptr<std::byte>& memory(size_t bucket);
  /// The factor on a gradient that is copied into this bucket.
  virtual double copied_prescale(size_t bucket) const = 0;

  /// A step that is begun and not over.
  virtual bool step_open() const = 0;
  /// Drives until the step is over; false when `until` passes first. Throws what went wrong;
  /// nothing of the step is in flight on the host afterwards.
  virtual bool wait(Deadline until) = 0;
  /// Gives the step up and tells the peers which rank it was, without waiting for them; the buckets
  /// belong to the step until drain().
  virtual void abandon() = 0;
  /// Waits out a step that is still open; its outcome concerns nobody any more, except when the
  /// group has failed. False when `until` passes first.
  bool drain(Deadline until);

  /// From the next step on, which no rank has begun, in the same words on every rank. A wait() then
  /// throws Error(mismatch) on all of them where weights differ.
  void watch_weights(WeightsWatch watch);
  /// The step that is about to be launched compares weights, and awaits this rank's checksums.
  virtual bool weights_due() const;
  void show_weights(std::vector<uint64_t> checksums);

 protected:
  /// Compares options and plan with all ranks'; throws Error(mismatch) on every rank, naming the
  /// first thing that differs. The group lives on. `further`: options in words, besides those.
  /// `interrupted` is that of Group::wait_for.
  BucketStep(std::shared_ptr<Group> group, std::vector<Parameter> parameters, BucketOptions options,
             const std::string& further, const std::function<void()>& interrupted);
  /// For the destructors, before any memory goes: buckets may still be written to, though their
  /// memory outlives the operations in flight.
  void end() noexcept;

  void allocate_buckets();
  std::byte* address(size_t parameter);
  /// Copies a gradient into its bucket, times copied_prescale().
  void copy_in(size_t parameter, const std::byte* gradient);
  /// Where this rank has none, unless a carrier sees to it.
  void put_zeros(size_t parameter);

  /// Submits a collective on a bucket whose gradients are known; `memory` is held until it has
  /// ended.
  void launch_bucket(size_t bucket, Options what, Buffer input, Buffer output,
                     std::shared_ptr<const void> memory);
  void launch(const std::string& name, Options what, Buffer input, Buffer output,
              std::shared_ptr<const void> memory);
  /// The same for the largest of all ranks' elements, in place.
  template <typename T>
  void launch_max(const std::string& name, const std::shared_ptr<std::vector<T>>& elements,
                  DType dtype) {
    const Buffer all{reinterpret_cast<std::byte*>(elements->data()), elements->size(), dtype};
    launch(name, CollectiveSpec{Collective::all_reduce, ReduceOp::max}, all, all, elements);
  }
  /// Tells the peers the flags, and what is compared of weights. `fare`: unless it was abandoned.
  void launch_flags(uint8_t fare);
  /// Drives until nothing is in flight; false when `until` passes first. The first error goes to
  /// `first`, unless one stands there.
  bool drive(Deadline until, std::optional<Error>& first);
  /// Nothing is in flight: drive() will not wait.
  bool is_idle() const { return in_flight_.empty() || in_flight_.back().done(); }  // by order

  /// World ranks that have given up.
  std::vector<int> quitters();
  /// Throws RemoteError: "`what` was abandoned on ranks …; `so`".
  [[noreturn]] void refuse(const std::vector<int>& quitters, const std::string& what,
                           const std::string& so) const;

  /// The step is shown in the trace from the first open_step() to close_step(). `done`: it counts,
  /// its gradients are reduced.
  void open_step() { trace_.open(group_->engine()->trace()); }
  void close_step(bool done);

  std::shared_ptr<Group> group_;
  BucketOptions options_;
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<std::shared_ptr<std::byte>> memory_;  // null: nobody needed it yet
  std::vector<BucketPlace> places_;
  Carriers carriers_;

  mutable std::mutex mutex_;  // guards everything below, and steps
  StepFlags flags_;
  bool abandoned_ = false;
  WeightsWatch weights_;

 private:
  std::shared_ptr<Stream> stream_;
  TraceSteps trace_;
  std::vector<Handle> in_flight_;
};

}  // namespace farandole
