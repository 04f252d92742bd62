#include "fusion/update_rule.h"

#include <cmath>
#include <sstream>

namespace farandole {
namespace {

UpdateFactors sgd_factors(const HyperParameters& h, int64_t step) {
  UpdateFactors f;
  f.decay = h.weight_decay;
  f.keep_first = h.momentum;
  f.take_first = 1 - h.dampening;
  f.step = -h.rate;
  f.fresh = step == 1;
  f.nesterov = h.nesterov;
  return f;
}

UpdateFactors adam_factors(const HyperParameters& h, int64_t step) {
  UpdateFactors f;
  if (h.decoupled)
    f.shrink = 1 - h.rate * h.weight_decay;
  else
    f.decay = h.weight_decay;
  f.take_first = 1 - h.beta1;
  f.keep_second = h.beta2;
  f.take_second = 1 - h.beta2;
  const auto t = static_cast<double>(step);
  f.step = -(h.rate / (1 - std::pow(h.beta1, t)));
  f.root = std::sqrt(1 - std::pow(h.beta2, t));
  f.epsilon = h.epsilon;
  return f;
}

}  // namespace

std::optional<Optimizer> optimizer_named(std::string_view name) {
  for (size_t i = 0; i < kOptimizerNames.size(); ++i)
    if (kOptimizerNames[i] == name) return static_cast<Optimizer>(i);
  return std::nullopt;
}

UpdateKind kind_of(Optimizer optimizer, const HyperParameters& h) {
  if (optimizer == Optimizer::adam) return UpdateKind::adam;
  return h.momentum != 0 ? UpdateKind::momentum : UpdateKind::sgd;
}

UpdateFactors factors_for(Optimizer optimizer, const HyperParameters& h, int64_t step,
                          double factor) {
  UpdateFactors f = optimizer == Optimizer::adam ? adam_factors(h, step) : sgd_factors(h, step);
  f.gradient = h.maximize ? -factor : factor;
  return f;
}

std::string describe(Optimizer optimizer, const HyperParameters& h) {
  std::ostringstream text;
  text.precision(17);
  text << "lr " << h.rate << ", weight_decay " << h.weight_decay;
  if (optimizer == Optimizer::adam)
    text << ", betas " << h.beta1 << " and " << h.beta2 << ", eps " << h.epsilon
         << (h.decoupled ? ", decoupled" : "");
  else
    text << ", momentum " << h.momentum << ", dampening " << h.dampening
         << (h.nesterov ? ", nesterov" : "");
  text << (h.maximize ? ", maximize" : "");
  return text.str();
}

}  // namespace farandole
