// The agreed order, cut into operations of the engine: which tensors travel together.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "schedule/collective_spec.h"

namespace farandole {

/// One tensor of the order, as all members of its set know it.
struct CutItem {
  uint32_t set = 0;
  CollectiveSpec spec;
  DType dtype = DType::float32;
  size_t bytes = 0;
};

struct CutLimits {
  size_t together;  // bytes of a pack
  size_t alone;     // a tensor this long goes by itself: packing it costs more than an operation
};

/// Indices of the items, by operation. Operations are in the order of their first items; an item
/// joins the newest pack of its likes that has room, over others that lie between.
std::vector<std::vector<size_t>> cut(std::span<const CutItem> order, const CutLimits& limits);

}  // namespace farandole
