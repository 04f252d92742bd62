// One operation whose arrays lie on a device of this rank, one or several that travel together: it
// goes by steps where those of all ranks do, else by the host.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "devices/staged_pieces.h"
#include "devices/steps.h"

namespace farandole {

/// Throws Error(invalid_argument) if the path that was asked for, by this call or for all of them,
/// folds in an order that the level forbids.
void check_level_of_way(const Group& group, const Options& options);

/// Warns, once in this process and on the group's first rank, that the level 'canonical' keeps NCCL
/// from arrays that it could reduce. `no_buckets`: Steps::why_no_buckets.
void warn_of_level(const Group& group, std::string_view no_buckets);

class StepCall : public OnDevices {
 public:
  /// Null where this rank alone decides that it goes by the host. `copies`: the call's, which begin
  /// if it goes by the host after all. `stream`: the operation's; null: the program's. Throws
  /// Error(invalid_argument) for an `algorithm` of the devices that cannot run, and where it should
  /// become part of a CUDA graph, and cannot.
  static std::shared_ptr<StepCall> offer(Group& group, Options& options,
                                         const std::vector<PlacedOperand>& arrays,
                                         std::shared_ptr<StagedCopies> copies,
                                         const std::shared_ptr<Stream>& stream = nullptr);

  /// The operand to submit: the array, or several as one, which has no memory.
  const Operand& operand() const { return operand_; }
  int device() const { return steps_->device(); }

  Backend& backend() override;
  std::shared_ptr<PiecesOnDevices> go_by_host(Operation& operation, size_t piece) override;
  size_t piece() const override { return piece_; }
  bool is_named() const override { return named_; }

  /// Whether it becomes part of a graph.
  bool is_captured() const { return arrays_.graph.has_value(); }
  /// Whether it went by steps; once the operation is complete on the host.
  bool launched() const { return arrays_.launched.load(std::memory_order_acquire); }
  /// Then, if it went by the host: results of arrays that travelled together are copied to where
  /// they were brought from.
  void unpack();
  /// Then: Steps::hand_over.
  void hand_over(std::optional<uint64_t> stream);

 private:
  StepCall(std::shared_ptr<Steps> steps, const Group& group, const Options& options,
           const std::vector<PlacedOperand>& arrays, const Operand& operand,
           std::shared_ptr<StagedCopies> copies, uint64_t call, std::optional<uint64_t> graph);
  void lay_together();

  std::shared_ptr<Steps> steps_;
  GraphBackend* graphs_ = nullptr;  // of steps_, in a graph
  bool named_;
  std::shared_ptr<Arena> arena_;
  int rank_, world_rank_, size_;
  CollectiveSpec spec_;
  std::vector<PlacedOperand> placed_;
  Operand operand_;
  std::shared_ptr<StagedCopies> copies_;
  uint64_t call_;
  size_t piece_;
  StepArrays arrays_;
  std::shared_ptr<Pack> pack_;  // on the host
};

}  // namespace farandole
