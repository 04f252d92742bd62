// Models whose steps run in graphs: in which of them weights are compared, and how they differ.
#pragma once

#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "fusion/weights.h"

namespace farandole {

/// The weights of one world's models. A model has a number of this process' own.
class PluginWeights {
 public:
  /// A step has begun on all ranks, so that all count alike, whatever graphs they have it in.
  /// Returns whether weights are compared in it (compares_weights()); they are in every step as
  /// long as they differ from the start.
  bool begin_step(int model, double period);
  /// How they differ, if they do. Not yet in the first step, as programs may broadcast after it,
  /// nor before a rank's have changed since.
  std::optional<Error> judge(int model, std::span<const std::string> names,
                             std::vector<WeightsRow> rows, const std::string& line);
  /// Ranks have joined: from now on they take different numbers of steps.
  void give_up();

 private:
  struct Model {
    uint64_t step = 0, equal_before = 0;
    std::vector<WeightsRow> at_start;  // where they differed
  };
  std::mutex mutex_;
  bool given_up_ = false;
  std::unordered_map<int, Model> models_;
};

}  // namespace farandole
