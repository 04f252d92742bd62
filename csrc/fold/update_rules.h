// The formulas of update.h, of one element or a vector of them, for processors and devices alike:
// what a rule makes of a value, its gradient and its state. `square_root` is the machine's own.
#pragma once

#include <cstddef>

#include "base/update_factors.h"

namespace farandole {

template <typename T>
struct Gradient {
  constexpr explicit Gradient(const UpdateFactors& f)
      : factor(static_cast<T>(f.gradient)), decay(static_cast<T>(f.decay)), decays(f.decay != 0) {}

  template <typename V>
  constexpr V operator()(const V& raw, const V& value) const {
    const V scaled = raw * factor;
    return decays ? scaled + value * decay : scaled;  // 0 · inf would be NaN
  }

  T factor, decay;
  bool decays;
};

template <typename T>
struct Sgd {
  static constexpr size_t kSlots = 0;

  constexpr explicit Sgd(const UpdateFactors& f) : gradient(f), step(static_cast<T>(f.step)) {}

  template <typename V, typename Root>
  constexpr void operator()(V& value, const V& raw, V*, Root) const {
    value = value + gradient(raw, value) * step;
  }

  Gradient<T> gradient;
  T step;
};

template <typename T>
struct Momentum {
  static constexpr size_t kSlots = 1;

  constexpr explicit Momentum(const UpdateFactors& f)
      : gradient(f),
        keep(static_cast<T>(f.keep_first)),
        take(static_cast<T>(f.take_first)),
        step(static_cast<T>(f.step)),
        fresh(f.fresh),
        nesterov(f.nesterov) {}

  template <typename V, typename Root>
  constexpr void operator()(V& value, const V& raw, V* state, Root) const {
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

  constexpr explicit Adam(const UpdateFactors& f)
      : gradient(f),
        weight(static_cast<T>(f.take_first)),
        rest(1 - weight),
        keep(static_cast<T>(f.keep_second)),
        take(static_cast<T>(f.take_second)),
        shrink(static_cast<T>(f.shrink)),
        step(static_cast<T>(f.step)),
        root(static_cast<T>(f.root)),
        epsilon(static_cast<T>(f.epsilon)) {}

  template <typename V, typename Root>
  constexpr void operator()(V& value, const V& raw, V* state, Root square_root) const {
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

}  // namespace farandole
