// Apart from base/fault.h: what includes that is compiled twice.
#pragma once

#include <string_view>

namespace farandole {

/// Arms a point in this process; throws Error(invalid_argument) on a bad specification.
/// rank: a number, or any. do: sigkill, sigstop, sigsegv, exit, sleep:SECONDS or delay:SECONDS.
void arm_fault(std::string_view specification, int rank);

}  // namespace farandole
