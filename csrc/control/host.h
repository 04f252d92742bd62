// A rank's knowledge of the others once they have met. For ranks on its host: the segment they all
// map, each one's doorbell and process descriptor. For ranks elsewhere: who they are, and the
// connection.
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

class ControlMesh;

/// A rank on another host has neither doorbell nor process here.
struct HostPeer {
  PeerInfo info;
  CpuSet cpus;       // where it may run
  Fd doorbell;       // eventfd that wakes its parked engine
  Fd process;        // pidfd: readable once it has died; none for ranks that are threads
  bool here = true;  // it maps this host's segment
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
  std::shared_ptr<ControlMesh> mesh{};  // between all ranks of several hosts; null on one

  int size() const { return static_cast<int>(peers.size()); }
  bool is_here(int world_rank) const { return peers[static_cast<size_t>(world_rank)].here; }
  bool are_here(const std::vector<int>& world_ranks) const;
  /// Whether two ranks share a host, this one or another.
  bool share_one(int world_rank, int other) const;
  /// The world ranks that map the segment, ascending.
  std::vector<int> ranks_here() const;
  /// "rank 3 (pid 4711)", in a world of several hosts "rank 3 (pid 4711 on b)": all of them may
  /// read it.
  std::string name_of(int world_rank) const;
  /// The state of a rank, as far as it is known here: "running", "on another host".
  std::string state_of(int world_rank) const;
  /// "rank 3 (pid 4711, stopped)", of one whose state is not known as name_of().
  std::string name_and_state_of(int world_rank) const;
  /// It is stopped, or in uninterruptible sleep, which only its own host sees.
  bool stands_still(int world_rank) const;
  bool is_stopped(int world_rank) const;
  /// Adds the same facts about the rank to `where`.
  Context about(int world_rank, Context where = {}) const;
};

/// The processors this process may run on.
CpuSet usable_cpus();

/// A descriptor of this process, readable for others once it has died.
Fd own_process();

/// All ranks in this process: for tests, where ranks are threads or take turns in one.
std::vector<Host> hosts_in_process(int size, size_t arena_bytes);

/// A world of one.
Host host_alone(size_t arena_bytes);

/// Why `rank` will never come, if so: it died, or left, "before it created the group". Ask before
/// you look for its work: it may do that and leave between the two.
std::optional<Error> absence_of(const Host& host, int rank, const std::string& when);

/// The state of a process, by /proc: "running", "stopped", "dead", …
std::string process_state(pid_t pid);
/// It is stopped, or in uninterruptible sleep.
bool stands_still(pid_t pid);
/// It is stopped, by a signal or a debugger.
bool is_stopped(pid_t pid);

}  // namespace farandole
