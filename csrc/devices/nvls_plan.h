// The collectives that a switch between devices folds: pure facts, the same on all ranks.
#pragma once

#include <string>

#include "base/dtype.h"
#include "schedule/collective_spec.h"

namespace farandole {

/// Parts of ranks begin at multiples of so many bytes.
inline constexpr size_t kNvlsGrain = 16;

/// Why the switch cannot run this, as one clause; empty: it can.
std::string why_not_by_nvls(const CollectiveSpec& spec, DType dtype);

}  // namespace farandole
