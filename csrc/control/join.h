// A rank's way into its world, once the ranks have met (python/farandole/_meeting) and it has
// mapped its host's memory: those of a host try to reach each other's, and all of several hosts
// connect.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "control/control_mesh.h"
#include "control/foreign_access.h"
#include "control/host.h"

namespace farandole {

/// The result of a meeting of ranks.
struct Roll {
  int rank = 0;
  std::vector<HostPeer> peers{};      // of all ranks, by rank; empty: a world of one
  std::shared_ptr<Segment> memory{};  // of this host
  bool on_several_hosts = false;
  std::vector<Fd> listeners{};  // there, of this rank's own addresses
  ControlMeshOptions mesh{};    // of the connections between ranks of several hosts
};

/// Throws Error when a rank dies, leaves, or does not come before the deadline. `interrupted` is
/// asked ten times a second, and throws to give up.
Host join(Roll roll, ForeignWish wish, Deadline deadline, const std::function<void()>& interrupted);

}  // namespace farandole
