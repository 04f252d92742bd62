#include "bindings/plugin_weights.h"

#include <utility>

namespace farandole {

bool PluginWeights::begin_step(int number, double period) {
  const std::lock_guard lock(mutex_);
  if (given_up_) return false;
  Model& model = models_[number];
  ++model.step;
  return model.equal_before == 0 || compares_weights(model.step, period);
}

std::optional<Error> PluginWeights::judge(int number, std::span<const std::string> names,
                                          std::vector<WeightsRow> rows, const std::string& line) {
  const std::lock_guard lock(mutex_);
  Model& model = models_[number];
  auto error = difference_of_weights(names, rows, {model.step, model.equal_before, line});
  if (!error) {
    model.equal_before = model.step;
  } else if (model.equal_before == 0) {
    if (model.at_start.empty())
      model.at_start = std::move(rows);
    else if (rows != model.at_start)
      return error;
    return std::nullopt;
  }
  return error;
}

void PluginWeights::give_up() {
  const std::lock_guard lock(mutex_);
  given_up_ = true;
}

}  // namespace farandole
