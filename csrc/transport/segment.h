// The memory that all ranks of one host map: one sealed memfd, made once, with no name to leave
// behind. It is sparse: pages exist when touched, so it is as large as the ranks could ever need
// and nothing is mapped or handed over later.
//
//   | page of rank 0 | … | page of rank P-1 | arena of rank 0 | … | arena of rank P-1 |
//
// A rank's page and arena are allocated by that rank alone; every rank may read them, and writes
// into another rank's arena only by the protocol of its owner (backends/shm_direct.h), or where
// that has offered a place (transport/shm_channel.h).
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/fd.h"
#include "base/seal.h"
#include "transport/wait_board.h"

namespace farandole {

/// An atomic word alone on its pair of cache lines: neighbours are prefetched together.
struct alignas(128) Word {
  std::atomic<uint64_t> value{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

enum class RankState : uint64_t {
  absent,
  present,
  leaving,  // it takes part in nothing more, but still serves others
  left,     // nor that, but its threads may still look at what it had opened
  gone,     // it touches no memory of others any more
};

/// An entry that a rank publishes under a key: where in its arena something lies. A withdrawn entry
/// keeps its key until its slot is needed, so that a peer that looks late sees that there was one.
/// All accesses are seq_cst: readers look at the key again after the rest (Segment::find).
struct DirectoryEntry {
  std::atomic<uint64_t> key{0};  // 0: never used, or changing hands
  std::atomic<uint64_t> offset{0};
  std::atomic<uint64_t> state{0};  // EntryState
};
enum class EntryState : uint64_t {
  open,
  closed,     // the owner has no more use for it
  withdrawn,  // the memory may hold something else
};
inline constexpr size_t kDirectoryEntries = 1000;
inline constexpr size_t kMostRanks = 4096;

/// A sample of a rank's own memory, shown when ranks meet (control/foreign_access.h): a number to
/// be found there, whether this rank found the others', and how fast. `step` releases the rest.
struct ForeignSample {
  std::atomic<uint64_t> step{0};
  uint64_t number = 0, number_at = 0, bytes_at = 0;  // addresses in its owner
  int32_t error = 0, refused_by = 0;
  uint32_t percent = 0;  // time of a copy by address, in that of copies through shared memory
  alignas(4096) std::byte bytes[64 << 10];  // to be copied
};

/// Why a rank leaves, if it gives a reason (control/farewell.h).
struct Farewell {
  std::atomic<uint64_t> state{0};  // FarewellState; after the rest
  int64_t since = 0;               // ns of the clock that all processes share
  int32_t exit_code = 0;           // 0: an exception
  char what[384] = {}, place[384] = {};
};

/// The address where other ranks reach a rank besides over this memory, as its transport wrote it.
struct ShownAddress {
  std::atomic<uint64_t> bytes{0};  // 0: not yet; released last
  std::byte text[64] = {};
};

struct RankPage {
  Word asleep;  // parked: ring its doorbell after publishing something
  Word state;   // RankState
  Word heard;   // of a rank elsewhere: Segment::heard_of
  Farewell farewell;
  ShownAddress address;
  ForeignSample foreign;
  DirectoryEntry directory[kDirectoryEntries];
  WaitBoard board;
};

/// The arena for each of so many ranks where no setting says it: the memory of the machine or of
/// the process' cgroup, or less where a ulimit, or the number of ranks, leaves less address space.
size_t default_arena_bytes(int ranks);

class Segment {
 public:
  /// Makes the segment; throws Error(resource) when the kernel refuses. `secret`: the job's, where
  /// it has one already.
  static std::shared_ptr<Segment> create(int ranks, size_t arena_bytes,
                                         const std::optional<Key>& secret = std::nullopt);
  /// Maps a segment made by another rank after checking seals, size and format.
  static std::shared_ptr<Segment> attach(Fd memory);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int fd() const { return memory_.get(); }
  int ranks() const { return ranks_; }
  /// For a rank elsewhere: a page in this process's own memory, with what is known of that rank.
  RankPage& page(int rank) const { return *pages_[static_cast<size_t>(rank)]; }
  /// `rank` is on another host, and maps another segment. Call it before anything is known of it.
  void set_apart(int rank);
  /// When ranks of this host last heard of one elsewhere, in nanoseconds: in memory that all map.
  std::atomic<uint64_t>& heard_of(int rank) const { return mapped_page(rank).heard.value; }
  RankState state_of(int rank) const;
  /// Sets the state of this process's own rank, or what it knows of one elsewhere.
  void show_state(int rank, RankState state) const;
  /// The job's secret, which only the ranks of the job know.
  std::span<const std::byte, 32> secret() const;
  /// Publishes the address of this process's own rank; once.
  void show_address(int rank, std::span<const std::byte> address) const;
  /// Empty: not yet.
  std::vector<std::byte> address_of(int rank) const;
  std::span<std::byte> arena(int rank) const;

  /// Offset of [data, data + bytes) when all of it lies in the arenas.
  std::optional<uint64_t> offset_of(const void* data, size_t bytes) const;
  /// Whether [offset, offset + bytes), as another rank has it, lies in the arenas.
  bool has(uint64_t offset, size_t bytes) const;
  /// Throws Malformed where it does not.
  std::byte* at(uint64_t offset, size_t bytes) const;

  /// Never blocks: where `rank` published `key`, or nothing yet.
  std::optional<uint64_t> find(int rank, uint64_t key) const;
  /// True when `rank` has published `key`, even if it has withdrawn it since.
  bool listed(int rank, uint64_t key) const;
  /// For a key once listed: true when `rank` has no more use for it (closed, withdrawn, or gone).
  bool closed(int rank, uint64_t key) const;
  /// The same for any key: true when `rank` has listed it and has no more use for it.
  bool has_closed(int rank, uint64_t key) const;
  void publish(int rank, uint64_t key, uint64_t offset);
  void close(int rank, uint64_t key);
  void withdraw(int rank, uint64_t key);

  /// Takes the control pages away from a forked child; arenas stay readable there.
  void hide_from_children();
  void close_descriptor() { memory_.reset(); }

 private:
  Segment(Fd memory, int ranks, size_t arena_bytes);
  RankPage& mapped_page(int rank) const;
  DirectoryEntry* entry(int rank, uint64_t key) const;
  DirectoryEntry* place_for(int rank, uint64_t key);

  // Streams are opened by any thread, connections by the one that polls.
  std::mutex publishing_;  // guards the writing of directories, and next_place_
  size_t next_place_ = 0;  // where the search begins: the longest withdrawn are used again first
  Fd memory_;
  int ranks_;
  size_t arena_bytes_;
  size_t arenas_begin_;
  size_t bytes_;
  std::byte* base_ = nullptr;
  std::vector<RankPage*> pages_;  // by rank
  std::vector<void*> apart_;      // those of them that are this process's own
};

/// The allocator of one rank's arena: page-granular first fit. Memory is zero when handed out;
/// released pages go back to the system. Any thread of the owning process.
class Arena {
 public:
  Arena(std::shared_ptr<Segment> segment, int rank);

  std::byte* allocate(size_t bytes);  // throws Error(resource) with need and have
  void release(std::byte* data);
  size_t bytes_in_use() const;
  size_t allocations() const;  // ever made, for the steady-state tests
  const std::shared_ptr<Segment>& segment() const { return segment_; }

 private:
  std::shared_ptr<Segment> segment_;
  pid_t owner_;
  std::span<std::byte> memory_;
  mutable std::mutex mutex_;       // guards the two maps and the counters
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;
  size_t in_use_ = 0;
  size_t allocations_ = 0;
};

}  // namespace farandole
