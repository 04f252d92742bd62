// The loops of update.h. Included by kernels.h; each instruction set's translation unit brings its
// own square_root().
#pragma once

#include "fold/float_mode.h"
#include "fold/instruction_sets/vectors.h"
#include "fold/kernels.h"
#include "fold/update.h"

namespace farandole {
namespace {

// Rules: a pack of values, their gradient and their state, to what they become.

template <typename T>
struct Gradient {
  explicit Gradient(const UpdateFactors& f)
      : factor(static_cast<T>(f.gradient)), decay(static_cast<T>(f.decay)), decays(f.decay != 0) {}

  template <typename V>
  V operator()(const V& raw, const V& value) const {
    const V scaled = raw * factor;
    return decays ? scaled + value * decay : scaled;  // 0 · inf would be NaN
  }

  T factor, decay;
  bool decays;
};

template <typename T>
struct Sgd {
  static constexpr size_t kSlots = 0;

  explicit Sgd(const UpdateFactors& f) : gradient(f), step(static_cast<T>(f.step)) {}

  template <typename V>
  void operator()(V& value, const V& raw, V*) const {
    value = value + gradient(raw, value) * step;
  }

  Gradient<T> gradient;
  T step;
};

template <typename T>
struct Momentum {
  static constexpr size_t kSlots = 1;

  explicit Momentum(const UpdateFactors& f)
      : gradient(f),
        keep(static_cast<T>(f.keep_first)),
        take(static_cast<T>(f.take_first)),
        step(static_cast<T>(f.step)),
        fresh(f.fresh),
        nesterov(f.nesterov) {}

  template <typename V>
  void operator()(V& value, const V& raw, V* state) const {
    const V g = gradient(raw, value);
    state[0] = fresh ? g : state[0] * keep + g * take;
    value = value + (nesterov ? g + state[0] * keep : state[0]) * step;
  }

  Gradient<T> gradient;
  T keep, take, step;
  bool fresh, nesterov;
};

template <typename T>
struct Adam {
  static constexpr size_t kSlots = 2;

  explicit Adam(const UpdateFactors& f)
      : gradient(f),
        weight(static_cast<T>(f.take_first)),
        rest(1 - weight),
        keep(static_cast<T>(f.keep_second)),
        take(static_cast<T>(f.take_second)),
        shrink(static_cast<T>(f.shrink)),
        step(static_cast<T>(f.step)),
        root(static_cast<T>(f.root)),
        epsilon(static_cast<T>(f.epsilon)) {}

  template <typename V>
  void operator()(V& value, const V& raw, V* state) const {
    value = value * shrink;
    const V g = gradient(raw, value);
    const V away = g - state[0];
    // From the nearer end, so that a weight of 1 gives g itself.
    state[0] = weight < T{0.5} ? state[0] + away * weight : g - away * rest;
    state[1] = state[1] * keep + g * take * g;
    value = value + state[0] * step / (square_root(state[1]) / root + epsilon);
  }

  Gradient<T> gradient;
  T weight, rest, keep, take, shrink, step, root, epsilon;
};

/// One pack through a rule; `load_from` and `store_to` know whether it is the incomplete last one.
template <typename Pack, typename Rule, typename Load, typename Store>
void update_pack(const Rule& rule, const UpdateArrays& arrays, Load load_from, Store store_to) {
  Pack state[kMostSlots];
  for (size_t s = 0; s < Rule::kSlots; ++s) state[s] = load_from(arrays.state[s]);
  Pack value = load_from(arrays.value);
  rule(value, load_from(arrays.gradient), state);
  for (size_t s = 0; s < Rule::kSlots; ++s) store_to(arrays.state[s], canonical<Pack>(state[s]));
  store_to(arrays.value, canonical<Pack>(value));
}

template <typename T, template <typename> typename Rule>
void update_all(const UpdateArrays& arrays, const UpdateFactors& factors) {
  using Pack = Vector<T>;
  const FloatMode mode;
  const Rule<T> rule(factors);
  const size_t bytes = arrays.count * sizeof(T);
  size_t at = 0;
  for (; at + sizeof(Pack) <= bytes; at += sizeof(Pack))
    update_pack<Pack>(
        rule, arrays, [at](const std::byte* from) { return load<Pack>(from + at); },
        [at](std::byte* to, const Pack& pack) { store(to + at, pack); });
  if (const size_t rest = bytes - at; rest > 0)
    update_pack<Pack>(
        rule, arrays, [=](const std::byte* from) { return load_part<Pack>(from + at, rest); },
        [=](std::byte* to, const Pack& pack) { store_part(to + at, pack, rest); });
}

template <typename T>
constexpr void fill_updates(UpdateFunction (&row)[kUpdateNames.size()]) {
  row[static_cast<size_t>(UpdateKind::sgd)] = update_all<T, Sgd>;
  row[static_cast<size_t>(UpdateKind::momentum)] = update_all<T, Momentum>;
  row[static_cast<size_t>(UpdateKind::adam)] = update_all<T, Adam>;
}

}  // namespace
}  // namespace farandole
