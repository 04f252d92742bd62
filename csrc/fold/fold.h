// The arithmetic of the engine: what two contributions become, and in which order many are folded.
// docs/determinism.md defines it; every function here keeps that definition bit for bit.
//
// Pure functions over memory the caller owns: no allocation, no failure, any thread. Pointers may
// have any byte alignment. An output may be exactly one of the inputs, never overlap one in part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace farandole {

/// out[i] = lower[i] ⊕ upper[i] for `count` elements, rounded to the dtype.
using FoldFunction = void (*)(std::byte* out, const std::byte* lower, const std::byte* upper,
                              size_t count);

/// The fastest this processor runs; mean folds like sum. nullptr where !has_meaning(op, dtype).
FoldFunction fold_for(DType dtype, ReduceOp op);

/// Multiplies every element by `factor`, converted once to the accumulate type: float32 for halves
/// and float32, else float64. Integers truncate toward zero and saturate at the ends of their
/// range, and are then divided by `divide`, again toward zero. A boolean stays true unless the
/// factor is zero. NaN becomes the quiet NaN of docs/determinism.md.
struct Scale {
  double factor = 1;
  int64_t divide = 1;  // integers only

  /// Changes nothing: elements are copied as they are.
  bool is_identity() const { return factor == 1 && divide <= 1; }
};

void scale(std::byte* out, const std::byte* in, size_t count, DType dtype, const Scale& by);

/// The two scales of an operation: of every leaf before it is folded, of the last fold.
struct Scales {
  Scale leaf, finish;
};

/// Mean of floats multiplies by 1/size (one multiplication, together with `postscale`); mean of
/// integers divides by `size` in integers, since 49 · (1/49) would truncate to 0.
Scales scales_for(DType dtype, ReduceOp op, double prescale, double postscale, int size);

/// Folds the leaves `sources` in canonical order: the tree over [0, G) that splits at the largest
/// power of two below G, recursively. Scales leaves and result, and rounds every node. Goes by
/// tiles that stay in the first cache, so scaling and inner nodes cost no pass over memory.
void fold_canonical(std::byte* out, std::span<const std::byte* const> sources, size_t count,
                    DType dtype, ReduceOp op, const Scales& scales);

/// The prefetch of a fold: its operands; or ownership of its destinations' cache lines, where other
/// cores have them; or nothing, where hardware does best.
enum class Ahead : uint8_t { operands, ownership, nothing };

/// The same, stored to every destination while the tile is hot. Destinations may be sources.
/// `ahead` is heeded by sums to two destinations.
void fold_canonical_to(std::span<std::byte* const> destinations,
                       std::span<const std::byte* const> sources, size_t count, DType dtype,
                       ReduceOp op, const Scales& scales, Ahead ahead = Ahead::operands);

/// The operands of a fold, which are never swapped.
enum class Side : uint8_t { lower, upper };

/// One fold of a schedule: out = arrived ⊕ held when what arrived is the lower operand, else
/// held ⊕ arrived. An operand that is a leaf is prescaled; the result is scaled when it finishes.
void fold_step(std::byte* out, const std::byte* arrived, Side arrived_is, bool arrived_is_leaf,
               const std::byte* held, bool held_is_leaf, bool finish, size_t count, DType dtype,
               ReduceOp op, const Scales& scales);

/// One store of a schedule: out = arrived, prescaled when a leaf, scaled when it finishes.
void store_step(std::byte* out, const std::byte* arrived, bool arrived_is_leaf, bool finish,
                size_t count, DType dtype, const Scales& scales);

/// The variants this build has and this processor runs, slowest first. All give the same bits.
std::span<const std::string_view> instruction_sets();
std::string_view best_instruction_set();
FoldFunction fold_for(DType dtype, ReduceOp op, std::string_view instruction_set);  // or nullptr

}  // namespace farandole
