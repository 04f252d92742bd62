// One call of a program compiled by XLA, taken out of its frame.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "group/grouped.h"
#include "jax/ffi.h"

namespace farandole {

/// A collective on the operands of one call. Refers to the program's memory, which stays until the
/// call is complete. After the operands there is one more, the token, which makes calls follow each
/// other: it counts them.
struct JaxCall {
  Options options;  // of each operand; the name is the call's label
  std::vector<Operand> operands;
  std::string ranks;      // of the process set; empty: all
  int size = 0;           // how many ranks the program was made for
  uint32_t position = 0;  // what the token said
};

/// Throws Error(invalid_argument) for what is not such a call, or of a dtype that we lack. The
/// token is counted on.
JaxCall read_call(const ffi::CallFrame& frame);

}  // namespace farandole
