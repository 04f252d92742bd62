// Reduces the gradients of a training step in buckets, while backward still computes others.
//
// A gradient is copied (and prescaled) into its bucket once, when it is ready and hot in cache; a
// large one has a bucket to itself, and may be reduced where it lies.
// Gradients may arrive in any order; buckets are launched strictly in plan order, so all ranks
// submit the same operations without messages. Each step ends with one more small all-reduce that
// agrees on which parameters were used by any rank.
//
// Parameters of a group are launched together. A parameter whose gradients turn out to be sparse is
// reduced as a dense one in that step; from the next one on it has no room in the buckets, and
// the caller reduces it another way.
//
// In some steps ranks compare their weights as well, by checksums that travel beside the gradients.
//
// The first plan follows the order of the parameters. The first step that every rank completes also
// agrees on the order in which gradients became ready; where buckets in that order can be launched
// clearly earlier, there is a better plan from then on, to be taken up between two steps.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fusion/bucket_step.h"
#include "fusion/ready_order.h"
#include "group/group.h"

namespace farandole {

struct ReducerOptions : BucketOptions {
  bool overlap = true;           // false: everything is launched in launch_rest()
  bool sparse_as_dense = false;  // sparse gradients keep their room in the buckets
};

class Reducer final : public BucketStep {
 public:
  /// Compares options and plan with all ranks'; throws Error(mismatch) on every rank, naming the
  /// first thing that differs. The group lives on. `interrupted` is that of Group::wait_for.
  Reducer(
      std::shared_ptr<Group> group, std::vector<Parameter> parameters,
      const ReducerOptions& options, const std::function<void()>& interrupted = [] {});
  ~Reducer() { end(); }

  /// A large tensor, alone in its bucket: lend() reduces it where it lies.
  bool in_place(int parameter) const {
    return buckets_[places_[static_cast<size_t>(parameter)].bucket].alone;
  }

  /// Any thread. Copies `parameters()[i].count` elements from `gradient` into the bucket, times
  /// prescale (in place when they already stand there), and launches complete buckets.
  /// `sparse_dims`: of a sparse gradient, which is given as a dense one as long as it has room.
  /// Throws Error(invalid_argument) when the parameter is already marked in this step.
  void mark_ready(int parameter, const std::byte* gradient, int sparse_dims = 0);
  /// The same for a parameter that is in_place(), without a copy: the result will stand in
  /// `gradient`, whose `owner` is held as long as it takes.
  void lend(int parameter, std::byte* gradient, std::shared_ptr<const void> owner,
            int sparse_dims = 0);
  /// The same for a parameter that a carrier carries: `bring` puts its gradient on its way into
  /// the bucket, unprescaled. Is not called for one that is marked already, or has no room.
  void mark_carried(int parameter, const std::function<void()>& bring, int sparse_dims = 0);
  /// While no step is open.
  void add_carrier(std::shared_ptr<Carrier> carrier) { carriers_.add(std::move(carrier)); }
  double copied_prescale(size_t bucket) const override {
    return buckets_[bucket].alone ? 1 : options_.prescale;
  }
  /// After all mark_ready() and lend() of the step have returned: launches what never became ready
  /// (as zeros). Waits for nobody; the step stays open until wait() or drain().
  void launch_rest();
  /// Until this step's buckets are reduced. Throws the verdict, or RemoteError when a rank
  /// abandoned its backward, or Error(mismatch) on all ranks when gradients of a parameter are
  /// sparse on some and dense on others, or ranks are in different steps. Afterwards devices may
  /// still write into gradients that were reduced there, whose owners they keep.
  bool wait(Deadline until) override;
  void abandon() override;
  bool weights_due() const override;

  /// The optimizer has taken a step. A step of the reducer is an error on all ranks where some have
  /// taken more than others.
  void note_update() {
    const std::lock_guard lock(mutex_);
    ++updates_;
  }
  /// This rank's settings by a number, for the step that is about to be launched. A rank that has
  /// joined has none.
  void show_settings(uint64_t settings) {
    const std::lock_guard lock(mutex_);
    settings_ = settings;
  }
  /// After wait(): whether ranks have shown different ones; all of them know.
  bool settings_differ() const { return settings_differ_; }

  /// Counts from 0, on all ranks at the same time.
  void count_updates_anew() {
    const std::lock_guard lock(mutex_);
    updates_ = 0;
  }

  /// A whole step of a rank that has joined: zeros in every bucket, and no say in the order. Waits
  /// for nobody; to be followed by drain(). While no step is open. Takes up a better plan.
  void step_by_proxy();
  /// The open step is launched, and nothing of it is in flight: wait() will not wait.
  bool step_over() const;

  /// A better plan is known, equal on all ranks. It is there after the same step on every rank.
  bool has_better_plan() const { return better_.has_value(); }
  /// Takes it up: buckets, places, counts and memory are new ones, and the old memory is released
  /// with its last owner. While no step is open; every rank between the same two steps. Throws
  /// Error(resource) when there is no room for the new buckets, which fails the group.
  void take_better_plan();
  /// Buckets and how early they go, in words.
  std::string describe() const;

  /// Gradients have been marked, or launched, since the last wait() or drain().
  bool step_open() const override {
    const std::lock_guard lock(mutex_);
    return marked_count_ > 0 || rest_launched_;
  }
  /// After wait(): whether any rank used the parameter.
  bool used(int parameter) const { return flags_.most(static_cast<size_t>(parameter)) != 0; }
  /// After wait(): the sparse dimensions of its gradient, on the rank that has most; 0 if dense.
  int sparse_dims(int parameter) const {
    return std::max(kDense, flags_.most(static_cast<size_t>(parameter))) - kDense;
  }
  /// By parameter: the sparse dimensions of gradients that have no room in the buckets, or will
  /// have none in the better plan; 0 of the others.
  const std::vector<int>& left_out() const { return left_out_; }
  /// The stream's key: the same on all ranks, and no other reducer's.
  uint64_t key() const { return stream()->key(); }

 private:
  void note_arrival(size_t parameter, int sparse_dims = 0);
  void launch_if_complete(size_t bucket);
  void launch_complete();
  void launch(size_t bucket);
  std::optional<size_t> laid_out_differently() const;
  void refuse_layouts(size_t parameter, int mine) const;
  void plan_again();
  bool leave_out_sparse(std::vector<Parameter>& parameters);
  void reset(bool done);
  void begin_step();  // under the mutex
  std::optional<Error> ranks_apart();

  const bool overlap_, sparse_as_dense_;
  // The mutex guards everything below.
  ReadyOrder order_;
  // Marks of a gradient: kDense plus its sparse dimensions.
  static constexpr int kDense = 1;
  struct Plan {
    std::vector<Parameter> parameters;
    std::vector<Bucket> buckets;
    double launch_point = -1;
  };
  std::optional<Plan> better_;
  std::vector<int> left_out_;
  double launch_point_ = -1;     // of the present plan, once the order is agreed
  std::vector<uint8_t> marked_;  // 0, or 1 + the sparse dimensions of this rank's gradient
  std::vector<size_t> missing_;  // per bucket: gradients not yet there
  struct Lying {
    std::byte* gradient = nullptr;  // null: in the bucket
    std::shared_ptr<const void> owner;
  };
  std::vector<Lying> lying_;  // per bucket: where the tensor alone is reduced in this step
  size_t marked_count_ = 0;
  size_t launched_ = 0;  // buckets
  bool rest_launched_ = false, by_proxy_ = false;
  int64_t updates_ = 0;
  uint64_t settings_ = 0;
  bool settings_differ_ = false;
  // A rank's fare: kUpdated plus its updates modulo kUpdates, or 0 where it has joined.
  static constexpr int64_t kUpdated = 2, kUpdates = 254;
};

}  // namespace farandole
