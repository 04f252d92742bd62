// Whether the ranks of a host may read and write each other's memory by address. The kernel may
// forbid it (Yama, seccomp, namespaces), so they try it once, when they meet, and agree.
#pragma once

#include <functional>
#include <vector>

#include "base/clock.h"
#include "control/host.h"

namespace farandole {

/// Every rank shows a number in its memory, reads every other's and writes it back, and times a
/// copy. Collective; the answer is the same on every rank: allowed when all want it and all
/// succeeded, preferred when more than half of them want it always or found it faster. Throws Error
/// when a rank dies, leaves, or does not come before the deadline.
ForeignAccess agree_on_foreign_access(const Host& host, ForeignWish wish, Deadline deadline,
                                      const std::function<void()>& interrupted);

/// The process of which all of these are descendants, itself perhaps among them, and that has no
/// such descendant; 0 when there is none that this process can see.
pid_t nearest_common_ancestor(const std::vector<pid_t>& processes);

}  // namespace farandole
