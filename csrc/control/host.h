// What a rank knows of the others on its host once they have met: the segment they all map, each
// one's doorbell and process descriptor.
#pragma once

#include <bitset>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "transport/segment.h"
#include "transport/transport.h"

namespace farandole {

using CpuSet = std::bitset<1024>;

struct HostPeer {
  PeerInfo info;
  CpuSet cpus;  // where it may run
  Fd doorbell;  // eventfd that wakes its parked engine
  Fd process;   // pidfd: readable once it has died; none for ranks that are threads
};

/// Whether this host's ranks read and write each other's memory by address; all agree.
struct ForeignAccess {
  bool allowed = false;    // they may
  bool preferred = false;  // they do where an operation does not say how
  std::string why_not{};   // of the first that is false
  bool demanded = false;   // more than half of them were told to, be it faster or not
};
enum class ForeignWish : uint8_t { never, if_faster, always };

struct Host {
  int rank = 0;
  std::vector<HostPeer> peers;  // by world rank, this one included
  std::shared_ptr<Segment> segment;
  ForeignAccess foreign;
  std::string handed_out;  // by rank 0 when the ranks met; the same on all of them

  int size() const { return static_cast<int>(peers.size()); }
};

/// The processors this process may run on.
CpuSet usable_cpus();

/// A descriptor of this process, readable for others once it has died.
Fd own_process();

/// All ranks in this process: for tests, where ranks are threads or take turns in one.
std::vector<Host> hosts_in_process(int size, size_t arena_bytes);

/// A world of one.
Host host_alone(size_t arena_bytes);

/// As much address space as a rank could ever fill: the machine's memory.
size_t default_arena_bytes();

/// Why `rank` will never come, if so: it died, or left, "before it created the group". Ask before
/// you look for what it may have done: it may do that and leave between the two.
std::optional<Error> absence_of(const Host& host, int rank, const std::string& when);

/// What /proc says a process is doing: "running", "stopped", "dead", …
std::string process_state(pid_t pid);
/// It is stopped, or in uninterruptible sleep.
bool stands_still(pid_t pid);

}  // namespace farandole
