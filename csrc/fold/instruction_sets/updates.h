// The loops of update.h. Included by kernels.h; each instruction set's translation unit brings its
// own square_root().
#pragma once

#include "fold/float_mode.h"
#include "fold/instruction_sets/vectors.h"
#include "fold/kernels.h"
#include "fold/update.h"
#include "fold/update_rules.h"

namespace farandole {
namespace {

/// The square root of an update rule.
struct SquareRoot {
  template <typename V>
  V operator()(const V& values) const {
    return square_root(values);
  }
};

/// One pack through a rule; `load_from` and `store_to` know whether it is the incomplete last one.
template <typename Pack, typename Rule, typename Load, typename Store>
void update_pack(const Rule& rule, const UpdateArrays& arrays, Load load_from, Store store_to) {
  Pack state[kMostSlots];
  for (size_t s = 0; s < Rule::kSlots; ++s) state[s] = load_from(arrays.state[s]);
  Pack value = load_from(arrays.value);
  rule(value, load_from(arrays.gradient), state, SquareRoot());
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
