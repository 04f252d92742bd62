// Many leaves in canonical order, and the single steps of a schedule, tile by tile.
#include "fold/fold.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/copy.h"
#include "fold/kernels.h"

namespace farandole {
namespace {

/// Scratch of one call, on the stack. Small enough to stay in the first cache (32 to 48 KiB), large
/// enough that tiles of two leaves are longer than the loops look ahead.
constexpr size_t kScratchBytes = size_t{24} << 10;
constexpr size_t kAlignment = 64;  // of the slots: a cache line, the widest vector

/// Slots that the tree over `leaves` needs at one time, every leaf scaled: the left side of a node
/// ends up in one, while the right side, which is never the larger, uses those behind it.
constexpr size_t slots_for(size_t leaves) { return static_cast<size_t>(std::bit_width(leaves)); }

struct alignas(kAlignment) Scratch {
  std::array<std::byte, kScratchBytes> bytes;  // left unset: written before it is read

  Scratch() {}  // NOLINT(modernize-use-equals-default): = default would let {} clear it
};

constexpr size_t slot_bytes(size_t slots) {
  return kScratchBytes / slots / kAlignment * kAlignment;
}
static_assert(slot_bytes(slots_for(size_t{1} << 31)) >= 256);

/// Calls body(elements, byte offset) for tiles of `slot` bytes.
template <typename Body>
void by_tiles(size_t count, size_t element_bytes, size_t slot, Body body) {
  const size_t tile = slot / element_bytes;
  for (size_t at = 0; at < count; at += tile) body(std::min(tile, count - at), at * element_bytes);
}

/// How a tree ends: its last fold, scaled, to every destination.
class Ending {
 public:
  Ending(DType dtype, ReduceOp op, const Scale& finish, Ahead ahead = Ahead::operands)
      : dtype_(dtype),
        fold_(fold_for(dtype, op)),
        finish_(finish),
        scales_(!finish.is_identity()),
        ahead_(ahead) {
    if (scales_) factor_ = factor_of(finish.factor);
    if (row(op).formula == Formula::add && !(scales_ && row(dtype).kind == DTypeKind::integer))
      sum_ = best_kernels().sum[index(dtype)];
  }

  FoldFunction fold() const { return fold_; }
  /// So many destinations are written in one pass over memory.
  bool in_one_pass(size_t destinations) const {
    return sum_ != nullptr ? destinations <= 2 : destinations == 1 && !scales_;
  }

  /// Destinations may be sources: each element is read before it is written.
  void operator()(std::span<std::byte* const> destinations, size_t offset, const std::byte* lower,
                  const std::byte* upper, size_t count) const {
    std::byte* result = destinations[0] + offset;
    std::byte* second = destinations.size() > 1 ? destinations[1] + offset : nullptr;
    if (sum_ == nullptr) {
      fold_(result, lower, upper, count);
      scale(result, result, count, dtype_, finish_);
    } else {
      sum_({result, second, lower, upper, ahead_}, count, scales_ ? &factor_ : nullptr);
    }
    spread(destinations.subspan(sum_ != nullptr && second != nullptr ? 2 : 1), offset, result,
           count);
  }

  /// Without a fold: a group of one.
  void alone(std::span<std::byte* const> destinations, size_t offset, size_t count) const {
    std::byte* result = destinations[0] + offset;
    scale(result, result, count, dtype_, finish_);
    spread(destinations.subspan(1), offset, result, count);
  }

 private:
  void spread(std::span<std::byte* const> destinations, size_t offset, const std::byte* result,
              size_t count) const {
    for (std::byte* other : destinations)
      if (other + offset != result) copy_bytes(other + offset, result, count * size_of(dtype_));
  }

  DType dtype_;
  FoldFunction fold_;
  Scale finish_;
  bool scales_;
  Ahead ahead_;
  Factor factor_{};
  SumFunction sum_ = nullptr;
};

/// One tile of the canonical tree.
struct Tree {
  std::span<const std::byte* const> sources;
  size_t offset;  // of the tile, in bytes
  size_t count;
  DType dtype;
  FoldFunction fold;
  const Scale& leaf_scale;
  size_t slot;  // bytes

  /// Leaf `i`: where it lies, or scaled in `scratch`.
  const std::byte* leaf(size_t i, std::byte* scratch) const {
    const std::byte* raw = sources[i] + offset;
    if (leaf_scale.is_identity()) return raw;
    scale(scratch, raw, count, dtype, leaf_scale);
    return scratch;
  }

  /// Calls fold(lower, upper) with the two sides of the node over [first, last). Uses `scratch`
  /// and behind it.
  template <typename Fold>
  void at_node(size_t first, size_t last, std::byte* scratch, Fold fold_sides) const {
    const size_t middle = first + std::bit_floor(last - first - 1);
    const std::byte* lower = side(first, middle, scratch);
    const std::byte* upper = side(middle, last, scratch + slot);
    fold_sides(lower, upper);
  }

  /// The fold of [first, last): a leaf, or a node in `scratch`.
  const std::byte* side(size_t first, size_t last, std::byte* scratch) const {
    if (last - first == 1) return leaf(first, scratch);
    at_node(first, last, scratch, [&](const std::byte* lower, const std::byte* upper) {
      fold(scratch, lower, upper, count);
    });
    return scratch;
  }
};

}  // namespace

void fold_canonical_to(std::span<std::byte* const> destinations,
                       std::span<const std::byte* const> sources, size_t count, DType dtype,
                       ReduceOp op, const Scales& scales, Ahead ahead) {
  if (destinations.empty() || sources.empty()) return;
  const Ending end(dtype, op, scales.finish, ahead);
  if (sources.size() == 2 && scales.leaf.is_identity() && end.in_one_pass(destinations.size()))
    return end(destinations, 0, sources[0], sources[1], count);  // tiles are for second passes

  Scratch scratch;
  const size_t slot = slot_bytes(slots_for(sources.size()));
  by_tiles(count, size_of(dtype), slot, [&](size_t elements, size_t offset) {
    const Tree tree{sources, offset, elements, dtype, end.fold(), scales.leaf, slot};
    // Destinations may be sources: none is written before the last fold of the tile reads them.
    if (sources.size() > 1)
      return tree.at_node(0, sources.size(), scratch.bytes.data(),
                          [&](const std::byte* lower, const std::byte* upper) {
                            end(destinations, offset, lower, upper, elements);
                          });
    scale(destinations[0] + offset, sources[0] + offset, elements, dtype, scales.leaf);
    end.alone(destinations, offset, elements);
  });
}

void fold_canonical(std::byte* out, std::span<const std::byte* const> sources, size_t count,
                    DType dtype, ReduceOp op, const Scales& scales) {
  fold_canonical_to({&out, 1}, sources, count, dtype, op, scales);
}

void fold_step(std::byte* out, const std::byte* arrived, Side arrived_is, bool arrived_is_leaf,
               const std::byte* held, bool held_is_leaf, bool finish, size_t count, DType dtype,
               ReduceOp op, const Scales& scales) {
  const Ending end(dtype, op, finish ? scales.finish : Scale{});
  const bool scales_arrived = arrived_is_leaf && !scales.leaf.is_identity();
  const bool scales_held = held_is_leaf && !scales.leaf.is_identity();
  const auto end_with = [&](size_t offset, const std::byte* a, const std::byte* h,
                            size_t elements) {
    if (arrived_is == Side::lower)
      end({&out, 1}, offset, a, h, elements);
    else
      end({&out, 1}, offset, h, a, elements);
  };
  if (!scales_arrived && !scales_held && end.in_one_pass(1))
    return end_with(0, arrived, held, count);

  Scratch scratch;
  const size_t slot = slot_bytes(2);
  by_tiles(count, size_of(dtype), slot, [&](size_t elements, size_t offset) {
    const auto operand = [&](const std::byte* raw, bool scaled, std::byte* space) {
      if (!scaled) return raw + offset;
      scale(space, raw + offset, elements, dtype, scales.leaf);
      return static_cast<const std::byte*>(space);
    };
    const std::byte* a = operand(arrived, scales_arrived, scratch.bytes.data());
    const std::byte* h = operand(held, scales_held, scratch.bytes.data() + slot);
    end_with(offset, a, h, elements);
  });
}

void store_step(std::byte* out, const std::byte* arrived, bool arrived_is_leaf, bool finish,
                size_t count, DType dtype, const Scales& scales) {
  const Scale first = arrived_is_leaf ? scales.leaf : Scale{};
  const Scale last = finish ? scales.finish : Scale{};
  if (first.is_identity() || last.is_identity())
    return scale(out, arrived, count, dtype, first.is_identity() ? last : first);
  // Twice, with a rounding between: by tiles, so that the second finds the first one's in the
  // cache.
  by_tiles(count, size_of(dtype), kScratchBytes, [&](size_t elements, size_t offset) {
    scale(out + offset, arrived + offset, elements, dtype, first);
    scale(out + offset, out + offset, elements, dtype, last);
  });
}

}  // namespace farandole
