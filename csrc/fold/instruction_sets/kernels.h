// The loops, from element kinds and operations to a filled table. Included once by each instruction
// set's translation unit, behind vectors.h and its own Float16. See Note [One source, many
// instruction sets] in vectors.h.
#pragma once

#include "base/own_lines.h"
#include "fold/float_mode.h"
#include "fold/instruction_sets/updates.h"
#include "fold/instruction_sets/vectors.h"
#include "fold/kernels.h"

namespace farandole {
namespace {

// Element kinds: how a pack of memory becomes operands of a formula, and its result memory again.

template <typename T>
struct Integer {
  using Pack = Vector<T>;
  static constexpr size_t kBytes = sizeof(T);

  template <typename F>
  static Pack map(F formula, const Pack& lower, const Pack& upper) {
    return formula(lower, upper);
  }
};

template <typename T>
struct Float {
  using Pack = Vector<T>;
  static constexpr size_t kBytes = sizeof(T);

  template <typename F, typename... Packs>
  static Pack map(F formula, const Packs&... packs) {
    return canonical<Pack>(formula(packs...));
  }
};

/// bfloat16 is the upper half of a float32: a word of memory holds two, and each is widened, folded
/// and narrowed where it lies.
struct BFloat16 {
  using Pack = Words;
  static constexpr size_t kBytes = 2;
  static constexpr uint32_t kUpper = 0xffff0000;

  template <typename F, typename... Packs>
  static Pack map(F formula, const Packs&... packs) {
    return bfloat16_pairs(formula(as_floats(packs << 16)...),
                          formula(as_floats(packs & kUpper)...));
  }

  static Floats widen(const Halves& halves) {
    return as_floats(__builtin_convertvector(halves, Words) << 16);
  }
  static Halves narrow(const Floats& values) {
    return __builtin_convertvector(rounded_to_bfloat16(values) >> 16, Halves);
  }
};

// Formulas. Operands keep their sides: nothing relies on a ⊕ b and b ⊕ a having the same bits.

struct Add {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    return lower + upper;
  }
};

struct Multiply {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    return lower * upper;
  }
};

struct Smaller {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    return lower < upper ? lower : upper;
  }
};

struct Larger {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    return lower > upper ? lower : upper;
  }
};

/// Neither smaller: equal, where OR changes nothing but makes a negative zero of two different
/// ones, or unordered, where OR keeps the NaN a NaN.
struct FloatMin {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    const auto smaller = lower<upper, larger = lower> upper;
    using Bits = __typeof__(smaller);
    const Bits either = reinterpret_cast<Bits>(lower) | reinterpret_cast<Bits>(upper);
    return smaller ? lower : larger ? upper : reinterpret_cast<V>(either);
  }
};

struct FloatMax {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    return -FloatMin()(V(-lower), V(-upper));
  }
};

/// Booleans are bytes; whatever is not zero is true, and the answer is 0 or 1.
struct Or {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    return reinterpret_cast<V>((lower | upper) != 0) & 1;
  }
};

struct And {
  template <typename V>
  V operator()(const V& lower, const V& upper) const {
    return reinterpret_cast<V>((lower != 0) & (upper != 0)) & 1;
  }
};

// Loops.

/// How far ahead operands are asked for. The hardware looks ahead too, but stops at every page, and
/// the longer formulas of the halves leave it less room to run on. Sums of 64 MiB operands beyond
/// the caches, best of 15, interleaved with the same loop without: bfloat16 22-28 to 35-42 GB/s,
/// float32 39-41 to 43-44, which is near its noise; at 8 MiB no difference.
constexpr size_t kAheadBytes = 4096;
constexpr size_t kLineBytes = 64;
/// How far ahead lines are made this core's own instead, where they are operands and destinations
/// that two cores write, each its part of both. From 128 to 512 bytes it makes no difference, from
/// 1024 on 1.05 at 1 MiB (Zen 4).
constexpr size_t kOwnedAheadBytes = 256;

/// Where results go: to one place, or to two while they are in a register.
struct One {
  std::byte* out;
  static constexpr Ahead ahead = Ahead::operands;

  void own(size_t) const {}

  template <typename Pack>
  void put(size_t at, const Pack& pack) const {
    store(out + at, pack);
  }
  template <typename Pack>
  void put_part(size_t at, const Pack& pack, size_t bytes) const {
    store_part(out + at, pack, bytes);
  }
};

struct Two {
  One first, second;
  Ahead ahead;

  void own(size_t at) const {
    own_line(first.out + at);
    own_line(second.out + at);
  }

  template <typename Pack>
  void put(size_t at, const Pack& pack) const {
    first.put(at, pack);
    second.put(at, pack);
  }
  template <typename Pack>
  void put_part(size_t at, const Pack& pack, size_t bytes) const {
    first.put_part(at, pack, bytes);
    second.put_part(at, pack, bytes);
  }
};

/// out := map(in…), pack by pack: one mapping serves lines, packs and the incomplete last pack.
///
/// `out` by value: behind a reference, every store of bytes could change it, and the loop would
/// load it anew for each line (bfloat16 to two destinations: 18 % slower).
template <typename Element, typename Map, typename Out, typename... Inputs>
void sweep(const Map& map, size_t count, Out out, const Inputs*... in) {
  using Pack = typename Element::Pack;
  const FloatMode mode;
  const size_t bytes = count * Element::kBytes;
  const size_t ahead = out.ahead == Ahead::ownership ? kOwnedAheadBytes : kAheadBytes;
  // Nothing beyond the end is asked for: those lines may be another rank's, who is writing them.
  const size_t ahead_end = bytes > ahead ? bytes - ahead : 0;
  size_t at = 0;
  for (; at < ahead_end; at += kLineBytes) {
    if (out.ahead == Ahead::ownership) out.own(at + ahead);
    if (out.ahead == Ahead::operands) (__builtin_prefetch(in + at + ahead), ...);
    for (size_t in_line = 0; in_line < kLineBytes; in_line += sizeof(Pack))
      out.put(at + in_line, map(load<Pack>(in + at + in_line)...));
  }
  for (; at + sizeof(Pack) <= bytes; at += sizeof(Pack)) out.put(at, map(load<Pack>(in + at)...));
  if (const size_t rest = bytes - at; rest > 0)
    out.put_part(at, map(load_part<Pack>(in + at, rest)...), rest);
}

template <typename Element, typename Formula>
struct Mapping {
  Formula formula;

  template <typename... Packs>
  auto operator()(const Packs&... packs) const {
    return Element::map(formula, packs...);
  }
};

template <typename Element, typename Formula>
void fold(std::byte* out, const std::byte* lower, const std::byte* upper, size_t count) {
  sweep<Element>(Mapping<Element, Formula>{}, count, One{out}, lower, upper);
}

template <typename T>
struct MultiplyBy {
  T factor;

  template <typename V>
  V operator()(const V& values) const {
    return values * factor;
  }
};

template <typename Element, auto kType>
void multiply(std::byte* out, const std::byte* in, size_t count, const Factor& factor) {
  const Mapping<Element, MultiplyBy<__typeof__(factor.*kType)>> map{{factor.*kType}};
  sweep<Element>(map, count, One{out}, in);
}

template <typename Element, typename Map>
void sweep_sum(const Map& map, const SumArrays& arrays, size_t count) {
  if (arrays.second == nullptr)
    sweep<Element>(map, count, One{arrays.out}, arrays.lower, arrays.upper);
  else
    sweep<Element>(map, count, Two{{arrays.out}, {arrays.second}, arrays.ahead}, arrays.lower,
                   arrays.upper);
}

/// Rounded as a fold is and then as a scale is: the same bits as one behind the other.
template <typename Element, auto kType>
void sum(const SumArrays& arrays, size_t count, const Factor* factor) {
  const Mapping<Element, Add> add;
  if (factor == nullptr) return sweep_sum<Element>(add, arrays, count);
  const Mapping<Element, MultiplyBy<__typeof__(factor->*kType)>> finish{{factor->*kType}};
  const auto both = [=](const auto& lower, const auto& upper) { return finish(add(lower, upper)); };
  sweep_sum<Element>(both, arrays, count);
}

/// Without a factor: integers are scaled by fold/scale.cpp.
template <typename Unsigned>
void integer_sum(const SumArrays& arrays, size_t count, const Factor*) {
  sweep_sum<Integer<Unsigned>>(Mapping<Integer<Unsigned>, Add>{}, arrays, count);
}

template <typename Half>
void widen(std::byte* out, const std::byte* in, size_t count) {
  constexpr size_t kLanes = sizeof(Floats) / sizeof(float);
  const FloatMode mode;
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes)
    store(out + 4 * at, canonical<Floats>(Half::widen(load<Halves>(in + 2 * at))));
  if (const size_t rest = count - at; rest > 0)
    store_part(out + 4 * at,
               canonical<Floats>(Half::widen(load_part<Halves>(in + 2 * at, 2 * rest))), 4 * rest);
}

template <typename Half>
void narrow(std::byte* out, const std::byte* in, size_t count) {
  constexpr size_t kLanes = sizeof(Floats) / sizeof(float);
  const FloatMode mode;
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes)
    store(out + 2 * at, Half::narrow(canonical<Floats>(load<Floats>(in + 4 * at))));
  if (const size_t rest = count - at; rest > 0)
    store_part(out + 2 * at,
               Half::narrow(canonical<Floats>(load_part<Floats>(in + 4 * at, 4 * rest))), 2 * rest);
}

// The table.

constexpr void fill(Kernels& table, DType dtype, const FoldFunction (&by_formula)[kFormulas]) {
  for (const ReduceOpRow& r : kReduceOps)
    if (has_meaning(r.op, dtype))
      table.fold[index(dtype)][index(r.op)] = by_formula[index(r.formula)];
}

template <typename Element, auto kType = &Factor::float32>
constexpr void fill_float(Kernels& table, DType dtype) {
  fill(table, dtype,
       {fold<Element, Add>, fold<Element, Multiply>, fold<Element, FloatMin>,
        fold<Element, FloatMax>});
  table.scale[index(dtype)] = multiply<Element, kType>;
  table.sum[index(dtype)] = sum<Element, kType>;
}

template <typename Half>
constexpr void fill_half(Kernels& table, DType dtype) {
  fill_float<Half>(table, dtype);
  table.widen[index(dtype)] = widen<Half>;
  table.narrow[index(dtype)] = narrow<Half>;
}

// One for each type of elements.

constexpr void fill_row(Kernels& table, const DTypeOf<NarrowFloat<kFloat16>>& r) {
  fill_half<Float16>(table, r.dtype);
}

constexpr void fill_row(Kernels& table, const DTypeOf<NarrowFloat<kBFloat16>>& r) {
  fill_half<BFloat16>(table, r.dtype);
}

constexpr void fill_row(Kernels& table, const DTypeOf<float>& r) {
  fill_float<Float<float>>(table, r.dtype);
  fill_updates<float>(table.update[index(r.dtype)]);
}

constexpr void fill_row(Kernels& table, const DTypeOf<double>& r) {
  fill_float<Float<double>, &Factor::float64>(table, r.dtype);
  fill_updates<double>(table.update[index(r.dtype)]);
}

/// Sums and products of integers wrap modulo 2ⁿ: signed ones are those of the unsigned type.
template <typename T>
constexpr void fill_row(Kernels& table, const DTypeOf<T>& r) {
  using Unsigned = std::make_unsigned_t<T>;
  fill(table, r.dtype,
       {fold<Integer<Unsigned>, Add>, fold<Integer<Unsigned>, Multiply>, fold<Integer<T>, Smaller>,
        fold<Integer<T>, Larger>});
  table.sum[index(r.dtype)] = integer_sum<Unsigned>;
}

constexpr void fill_row(Kernels& table, const DTypeOf<Boolean>& r) {
  using Bytes = Integer<uint8_t>;
  fill(table, r.dtype, {fold<Bytes, Or>, fold<Bytes, And>, fold<Bytes, And>, fold<Bytes, Or>});
}

constexpr Kernels make_kernels() {
  Kernels table;
  std::apply([&](const auto&... rows) { (fill_row(table, rows), ...); }, kTypedRows);
  return table;
}

}  // namespace
}  // namespace farandole
