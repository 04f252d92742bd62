// Bulk conversions between floating-point types, and scaling under its other name.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace farandole {

/// out[i] = in[i] as `out_dtype`, rounded once, to nearest even; NaN becomes the quiet NaN of
/// docs/determinism.md. Between float16, bfloat16, float32 and float64; the same type copies.
/// Pointers may have any alignment; out and in do not overlap. Any other type: Error.
void cast(std::byte* out, DType out_dtype, const std::byte* in, DType in_dtype, size_t count);

/// out[i] = factor · in[i], as scale() defines it; out may be exactly in.
void copy_scaled(std::byte* out, const std::byte* in, size_t count, DType dtype, double factor);

}  // namespace farandole
