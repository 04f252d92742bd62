// Whether ranks have the same weights, from checksums of their parameters.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "group/group.h"

namespace farandole {

/// One rank's, in the model's order.
struct WeightsRow {
  int rank = 0;
  std::vector<uint64_t> checksums;

  bool operator==(const WeightsRow&) const = default;
};

/// Further facts for the error's text.
struct WeightsContext {
  uint64_t step = 1;          // that has begun, from 1 on
  uint64_t equal_before = 0;  // the step before which they were the same; 0: never looked at
  std::string line;           // of a program, that makes them equal
};

/// Mismatch in the same words for everybody, about the first parameter that differs; nothing where
/// none does. A row has as many checksums as there are names.
std::optional<Error> difference_of_weights(std::span<const std::string> names,
                                           std::span<const WeightsRow> rows,
                                           const WeightsContext& context);

/// Whether a step compares weights: the first two, where ranks begin apart or update apart, and
/// then one every `period` steps; the first alone where that is infinite.
bool compares_weights(uint64_t step, double period);

/// One model's weights, compared in some of its steps. Steps begin and end alike on every rank, so
/// that all know when.
class WeightsWatch {
 public:
  WeightsWatch() = default;  // never
  /// `period`: see compares_weights(). `line`: see above.
  WeightsWatch(std::vector<std::string> names, double period, std::string line)
      : names_(std::move(names)), period_(period), line_(std::move(line)) {}

  /// In the present step.
  bool due() const {
    return period_ > 0 && (equal_before_ == 0 || compares_weights(step_, period_));
  }
  /// This rank's, in the model's order, for the present step.
  void show(std::vector<uint64_t> checksums);
  /// Sends the other ranks the checksums shown since the last time, or that there were none. None
  /// where it is not due.
  std::optional<Handle> launch(Group& group, const std::shared_ptr<Stream>& stream);
  /// When that is over: how weights differ between the ranks that have shown theirs.
  std::optional<Error> judge(const Group& group);
  /// The present step is over, on all ranks.
  void step_taken() { ++step_; }

 private:
  size_t width() const { return 1 + names_.size(); }

  std::vector<std::string> names_;
  double period_ = 0;
  std::string line_;
  uint64_t step_ = 1, equal_before_ = 0;
  std::vector<uint64_t> shown_;
  // This rank's row, then all ranks': whether checksums were shown, and those. Shared with the
  // operation in flight.
  std::shared_ptr<std::vector<uint64_t>> rows_;
};

}  // namespace farandole
