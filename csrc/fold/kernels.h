// The loops of one instruction set as a table. The same source fills every table
// (instruction_sets/kernels.h); the processor chooses one, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fold/fold.h"
#include "fold/update.h"

namespace farandole {

/// A factor in both accumulate types, each converted once.
struct Factor {
  float float32;
  double float64;
};
Factor factor_of(double factor);

/// The last fold of a sum: to `out`, and to `second` unless it is null, multiplied by `factor`
/// unless it is null, which it is for integers.
struct SumArrays {
  std::byte* out;
  std::byte* second;
  const std::byte* lower;
  const std::byte* upper;
  Ahead ahead;  // with `second`; to one place it is the operands
};
using SumFunction = void (*)(const SumArrays& arrays, size_t count, const Factor* factor);

using FloatScaleFunction = void (*)(std::byte* out, const std::byte* in, size_t count,
                                    const Factor& factor);
using UpdateFunction = void (*)(const UpdateArrays& arrays, const UpdateFactors& factors);
using CastFunction = void (*)(std::byte* out, const std::byte* in, size_t count);

/// Plain arrays: nothing here may bring an inline function into a translation unit that is compiled
/// for a newer processor, where the linker could keep that copy for everyone.
struct Kernels {
  FoldFunction fold[kDTypes.size()][kReduceOps.size()] = {};
  FloatScaleFunction scale[kDTypes.size()] = {};                    // floats only
  SumFunction sum[kDTypes.size()] = {};                             // all but booleans
  CastFunction widen[kDTypes.size()] = {};                          // a half to float32
  CastFunction narrow[kDTypes.size()] = {};                         // float32 to a half
  UpdateFunction update[kDTypes.size()][kUpdateNames.size()] = {};  // float32 and float64
};

// The tables that were built.
extern const Kernels kBaselineKernels, kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels;

/// The table that fold_for(dtype, op) and everything else here uses.
const Kernels& best_kernels();
const Kernels* kernels_for(std::string_view instruction_set);  // nullptr if not available

}  // namespace farandole
