// Named points where a test may make this process fail: FARANDOLE_FAULT="rank=1,at=mapped.write#3,
// do=sigkill" (the third time rank 1 comes by). Only builds with FARANDOLE_FAULT_POINTS have them;
// elsewhere the call is empty, and Config refuses the variable.
#pragma once

#include <string_view>

#include "base/clock.h"

namespace farandole {

#ifdef FARANDOLE_FAULT_POINTS
inline constexpr bool kFaultPoints = true;
void fault_point(std::string_view name);
/// How long an operation with this name is kept from beginning: FARANDOLE_FAULT="rank=any,
/// at=bucket,do=delay:0.005" gives the transport a latency for every one named "bucket ...". It
/// occupies no thread: polling goes on meanwhile.
Duration fault_latency(std::string_view operation);
/// Any latency is armed: an engine has to look again without being woken.
bool fault_latency_armed();
#else
inline constexpr bool kFaultPoints = false;
inline void fault_point(std::string_view) {}
inline Duration fault_latency(std::string_view) { return {}; }
inline bool fault_latency_armed() { return false; }
#endif

}  // namespace farandole
