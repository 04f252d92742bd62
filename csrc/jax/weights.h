// Whether ranks have the same weights, in programs compiled by XLA: two calls, with the program's
// own all-gather between them.
#pragma once

#include <optional>

#include "base/error.h"
#include "jax/ffi.h"

namespace farandole {

/// The checksum of every operand into the one result, as two words of 32 bits.
void answer_checksums(const ffi::CallFrame& frame);

/// Operands: the ranks' checksums, one rank after the other, and the number of the step.
/// Attributes: `names` and `ranks`, a line each; `period`, in steps; `line`, of a program. Returns
/// how weights differ, if they do.
std::optional<Error> answer_weights(const ffi::CallFrame& frame);

}  // namespace farandole
