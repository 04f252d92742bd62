// Faults that a sanitizer must notice: ctest runs each under its sanitizer, and fails if it does
// not.
#pragma once

#include <string_view>

namespace testing {

/// Does what the name says: read_past_the_end, overflow or race. False if there is no such fault.
bool plant(std::string_view fault);

}  // namespace testing
