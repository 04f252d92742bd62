// How the ranks of one host find each other: over an abstract UNIX socket whose name follows from
// how the job was started. Both sides check that the other runs as the same user; no name is left
// in any file system.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control/host.h"

namespace farandole {

/// The most characters that rank 0 can hand out.
inline constexpr size_t kMostHandedOut = 2047;

/// A rank of a world of several hosts, as the ranks told each other before those of a host meet.
struct RankElsewhere {
  std::string host;  // the same for ranks that are to share memory; a name for people
  pid_t pid = 0;     // there
  std::vector<std::byte> addresses;  // where it listens, one after the other, the best ones first
};

/// How a rank meets those on other hosts.
struct OtherHosts {
  std::vector<RankElsewhere> ranks;  // of the whole world, by rank
  SegmentSecret secret{};            // the job's
  std::vector<Fd> listeners;         // of this rank's own addresses
};

/// Bytes of a word that a program's ranks agree on.
inline constexpr size_t kMostAgreed = 200;

struct Invitation {
  int rank = 0;
  int size = 1;
  std::string job;  // same on all ranks of this job and no other, e.g. "127.0.0.1:29500:run:epoch"
  size_t arena_bytes = 0;
  std::string settings{};                        // that all ranks must have: "A=1, B=2"
  std::string agree{};                           // a word of the program's own that all must give
  std::function<void()> interrupted = [] {};     // asked ten times a second; throws to give up
  ForeignWish foreign = ForeignWish::if_faster;  // reaching each other's memory by address
  std::string hand_out{};                        // rank 0's: all are told it (Host::handed_out)
  std::shared_ptr<OtherHosts> others{};          // null: all ranks are on this host

  /// The world ranks on this host, ascending; the first of them holds the meeting.
  std::vector<int> ranks_here() const;
  int holder() const { return ranks_here().front(); }
};

/// Blocks until all ranks have met or the deadline has passed: those of this host over the socket,
/// then all of them over TCP, where there are others.
/// Throws Error: rendezvous (missing ranks, wrong or duplicate rank, differing sizes — on every
/// rank that dialled in), version_mismatch, authentication.
Host meet(const Invitation& invitation, Deadline deadline);

}  // namespace farandole
