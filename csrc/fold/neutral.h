// The neutral element of a fold: the contribution of a rank that has none.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace farandole {

/// Fills `count` elements: zero for sum and mean, one for product, the largest value (infinity of
/// floats) for min and the smallest for max. The pointer may have any alignment.
void fill_neutral(std::byte* data, size_t count, DType dtype, ReduceOp op);

}  // namespace farandole
