// Named points where a test may make this process fail: FARANDOLE_FAULT="rank=1,at=window.write#3,
// do=sigkill" (the third time rank 1 comes by). Only builds with FARANDOLE_FAULT_POINTS have them;
// elsewhere the call is empty, and Config refuses the variable.
#pragma once

#include <string_view>

namespace farandole {

#ifdef FARANDOLE_FAULT_POINTS
inline constexpr bool kFaultPoints = true;
void fault_point(std::string_view name);
#else
inline constexpr bool kFaultPoints = false;
inline void fault_point(std::string_view) {}
#endif

/// Arms a point in this process; throws Error(invalid_argument) on a bad specification.
/// do: sigkill, sigstop, sigsegv, exit, or sleep:SECONDS.
void arm_fault(std::string_view specification, int rank);

}  // namespace farandole
