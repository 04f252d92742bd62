// The optimizer's step where every rank owns 1/n of each bucket: it folds the gradients of its
// part, updates its part of the parameters with the state that it alone holds, and stores the new
// values to all ranks, in one pass over memory and two waits.
//
//   take() …       gradients, as backward makes them, into buckets that all ranks map
//   begin()        says which gradients there are and what is to be done; waits for nobody
//   wait()         a byte per parameter goes round: each rank's gradients, whether all do the
//                  same; then the buckets are updated
//
// Among several hosts there is no such memory: gradients are reduce-scattered, each rank updates
// its part, and the new values are all-gathered. That sends what an all-reduce sends.
//
// Nothing is reduced before begin(): a rank may still change its mind until then.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fusion/bucket_step.h"
#include "fusion/shard.h"
#include "fusion/update_rule.h"
#include "group/group.h"

namespace farandole {

struct ShardedOptions : BucketOptions {
  Optimizer optimizer = Optimizer::sgd;
  size_t slots = 0;  // of state, per element
};

/// Used by one thread at a time.
class ShardedUpdate final : public BucketStep {
 public:
  enum class Task : uint8_t { update, norm_two, norm_infinite };

  /// Compares options and plan with all ranks', as Reducer does. `interrupted` is that of
  /// Group::wait_for.
  ShardedUpdate(
      std::shared_ptr<Group> group, std::vector<Parameter> in_ready_order,
      const ShardedOptions& options, std::function<void()> interrupted = [] {});
  ~ShardedUpdate() { end(); }

  /// The parameters' memory, which all ranks map.
  const std::shared_ptr<std::byte>& values(size_t bucket) const { return values_[bucket]; }
  /// Gradients in buckets are as the program has made them, and may be added to.
  double copied_prescale(size_t) const override { return 1; }

  /// While no task is under way.
  template <typename CarrierOfShards>
  void add_carrier(std::shared_ptr<CarrierOfShards> carrier) {
    shard_carriers_.push_back(carrier.get());
    carriers_.add(std::move(carrier));
  }
  bool over_hosts() const { return over_hosts_; }

  /// Copies a gradient into its bucket.
  void take(size_t parameter, const std::byte* gradient);

  /// In place of take(): it was put there by other means.
  void note_taken() { open_step(); }

  /// Begins a task with the gradients that `present` names (by parameter). The reduced gradient is
  /// taken times `factor`. `groups`: the settings, and `group_of` whose they are, by parameter, the
  /// same on every rank. A parameter of kNoGroup takes no part.
  void begin(Task task, std::vector<uint8_t> present, std::vector<HyperParameters> groups,
             std::vector<int> group_of, double factor);
  /// Until the task is done. Throws the verdict; RemoteError when a rank gave the step up; Mismatch
  /// when ranks do different things, or have different weights. In the latter cases no parameter
  /// has changed.
  bool wait(Deadline until) override;
  void abandon() override;
  Task task() const { return task_; }
  Shard& shard(size_t bucket) const { return *shards_[bucket]; }
  /// Whether this rank has a gradient of it in the present task.
  bool is_present(size_t parameter) const { return present_[parameter] != 0; }
  /// A task is under way.
  bool step_open() const override { return phase_ != Phase::resting; }
  /// The norm of the reduced gradients times the factor; after a norm task.
  double norm() const { return norm_; }

  // The optimizer's state.

  size_t slots() const { return slots_; }
  /// Bytes of state that this rank holds.
  size_t state_bytes() const;
  std::vector<int64_t> steps;  // updates taken, by parameter
  /// Puts all ranks' parts of a bucket's state together in `whole`. Collective.
  void gather_state(size_t bucket, size_t slot, std::byte* whole);
  /// Takes this rank's part of it.
  void set_state(size_t bucket, size_t slot, const std::byte* whole);
  /// Makes these parameters' state that of parameters that were never updated.
  void reset_state(const std::vector<size_t>& parameters);

 private:
  enum class Phase : uint8_t { resting, agreeing, working, gathering, summing };

  void launch_facts();
  void launch_buckets();
  void make_epilogues();
  std::shared_ptr<const void> memory_of(size_t bucket) const;
  void apply_to_parts();
  void launch_gathers();
  void launch_sum();
  void advance();
  void refuse_quitters();
  void check_groups(size_t groups, const std::vector<int>& group_of) const;
  void refuse_differences();
  void prepare();
  void rest(bool done);
  std::vector<std::string> facts() const;

  const Optimizer optimizer_;
  const size_t slots_;
  std::function<void()> interrupted_;
  std::vector<std::shared_ptr<std::byte>> values_;
  std::vector<std::shared_ptr<Shard>> shards_;
  std::vector<ShardCarrier*> shard_carriers_;  // of carriers_
  const bool over_hosts_;
  std::vector<std::shared_ptr<std::byte>> reduced_;  // over hosts: this rank's part of each bucket

  // The task.
  Phase phase_ = Phase::resting;
  Task task_ = Task::update;
  std::vector<uint8_t> present_;
  std::vector<HyperParameters> groups_;
  std::vector<int> group_of_;  // by parameter
  double factor_ = 1, norm_ = 0;
  std::vector<std::shared_ptr<PartNorm>> norms_;
  std::vector<std::shared_ptr<Epilogue>> epilogues_;  // by bucket
  std::shared_ptr<double> sum_ = std::make_shared<double>(0);
};

}  // namespace farandole
