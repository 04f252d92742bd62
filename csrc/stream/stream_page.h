// The page that each rank shares about one stream: where it is in the stream's order of operations,
// and the small memory its peers read. One page per rank and stream, in the owner's arena.
//
// Only the owner writes its page, but for lent slots. Sequence numbers are 32 bits and wrap; they
// are compared by signed difference. A progress word is (sequence << 32 | count), so it only ever
// grows.
#pragma once

#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "stream/descriptor.h"
#include "transport/segment.h"

namespace farandole {

/// Where a rank's buffers lie for one operation: offset in the segment + 1 where all ranks map
/// them, else kForeign and the address in their owner; 0 for an empty buffer.
struct Addresses {
  std::atomic<uint64_t> input{0}, output{0};
};
inline constexpr uint64_t kForeign = uint64_t{1} << 63;  // no address of a process has this bit

inline constexpr size_t kLinePayload = 56;  // a cache line less its flag
inline constexpr size_t kLines = 19;        // 1 KiB; then one_shot is quicker

// Data that are copied to be read go through slots, which go round: in each lap a rank's are those
// of the next page (StreamMemory::home). A core that writes a line which it wrote before, and
// another has read since, waits for it 9 to 27 ns; where the other wrote it and this one has read
// it, 0.7 (Zen 4; prefetchw changes neither). So where data go both ways few slots do, and ranks
// write where they last read: an all-reduce of 64 KiB 7.8 -> 4.0 us, of 4 MiB 230 -> 200. Where
// they go from one rank, or to it, slots are so many that lines have left their readers' caches: a
// broadcast of 32 KiB with 16 slots 2.8 us, with 2 of them 4.9.
inline constexpr size_t kOneShotBytes = 32 << 10;
inline constexpr size_t kOneShotPiece = 4 << 10;  // whole elements of every type
inline constexpr uint32_t kOneShotSlots = 16;
inline constexpr uint32_t kOneShotSlotsBothWays = 2;  // even as well: see OneShot
inline constexpr size_t kCicoChunk = 64 << 10;        // one rank's part of a block
inline constexpr uint64_t kCicoSlots = 4;             // blocks in flight
inline constexpr uint64_t kCicoSlotsBothWays = 2;
/// From so many blocks on, data come from memory, and not evenly: a reduce_scatter of 64 MiB with 2
/// blocks in flight 7.1 ms, with 8 of them 6.6.
inline constexpr uint64_t kLongCico = 64;
inline constexpr uint64_t kLongCicoSlots = 8;

/// Data and flag in one cache line: one transit carries both.
struct alignas(64) Line {
  std::atomic<uint64_t> flag{0};  // released after the payload; (sequence << 32 | hash)
  std::byte payload[kLinePayload];
};

struct StreamPage {
  /// A rank that has not started any operation stands at the number before the first.
  explicit StreamPage(uint32_t sequence) {
    const uint64_t none = uint64_t{sequence} << 32;
    entry.posted.store(none, std::memory_order_relaxed);  // released by the directory
    for (Word* word : {&published, &folded, &gathered, &completed, &described, &compared})
      word->value.store(none, std::memory_order_relaxed);
  }

  // The newest operation this rank has started: (sequence << 32 | hash), and where its buffers lie.
  struct alignas(128) {
    std::atomic<uint64_t> posted{0};
    Addresses addresses[2];  // by sequence parity
  } entry;
  Word published;  // progress: blocks of my input that stand in my slots
  Word folded;     // progress: blocks of all inputs that I have consumed
  Word gathered;   // progress: blocks of all results that I have taken
  Word completed;  // newest operation that needs nothing more from this rank
  Word inside;     // not 0 while I write into other ranks' memory
  Word described;  // newest operation whose descriptor stands below
  Word compared;   // newest operation whose descriptors I have read
  Descriptor descriptor;
  // For people, while an operation lasts: whose data I wait for, (sequence << 32 | member + 1), and
  // when I last looked (on the clock that all processes share).
  static constexpr size_t kHoldups = 4;
  struct alignas(128) {
    std::array<std::atomic<uint64_t>, kHoldups> by{};
    std::atomic<int64_t> looked{0};
  } holdups;
  Line lines[2][kLines];                                          // by sequence parity
  alignas(128) std::byte one_shot[kOneShotSlots][kOneShotBytes];  // lent
  // The slots of cico follow: see cico_bytes().
};

/// Slots for blocks of all ranks' parts, then as many for one rank's results.
inline size_t cico_bytes(int size) {
  return kLongCicoSlots * kCicoChunk * (static_cast<size_t>(size) + 1);
}
inline std::byte* input_slot(StreamPage& page, int size, uint64_t slot) {
  auto* begin = reinterpret_cast<std::byte*>(&page + 1);
  return begin + slot * kCicoChunk * static_cast<size_t>(size);
}
inline std::byte* result_slot(StreamPage& page, int size, uint64_t slot) {
  return input_slot(page, size, kLongCicoSlots) + slot * kCicoChunk;
}

constexpr uint64_t progress(uint32_t sequence, uint64_t count) {
  return uint64_t{sequence} << 32 | count;
}
inline bool reached(const Word& word, uint64_t target) {
  return static_cast<int64_t>(word.value.load(std::memory_order_acquire) - target) >= 0;
}
inline void publish(Word& word, uint64_t value) {
  word.value.store(value, std::memory_order_release);  // partner: reached
}

/// A rank's view of one stream: its own page, its members' pages, the segment between them.
struct StreamMemory {
  int rank = 0;                    // within the group
  std::vector<int> members;        // world ranks, by group rank
  std::vector<StreamPage*> pages;  // by group rank; null until the peer has opened the stream
  std::shared_ptr<Segment> segment;
  uint64_t fate = 0;             // the key that a member lists until it has closed the group
  std::vector<pid_t> processes;  // by group rank
  bool foreign = false;          // every rank may read and write the others' memory by address
  bool prefers_foreign = false;  // and does, where it is not told how
  bool demands_foreign = false;  // rather than copy, whatever is faster
  const std::atomic<uint64_t>* abort = nullptr;  // not 0 once the group has failed
  uint64_t ticket = 0;                           // the operation in flight: (sequence << 32 | hash)

  int size() const { return static_cast<int>(members.size()); }
  StreamPage& mine() const { return *pages[static_cast<size_t>(rank)]; }
  uint32_t sequence() const { return static_cast<uint32_t>(ticket >> 32); }
  StreamPage& page(int r) const { return *pages[static_cast<size_t>(r)]; }
  /// The page whose slots are rank r's in a lap.
  StreamPage& home(int r, uint64_t lap) const {
    return page(static_cast<int>((static_cast<uint64_t>(r) + lap) % members.size()));
  }
  bool failed() const { return abort->load(std::memory_order_seq_cst) != 0; }
};

/// The other ranks of which `has(r)` does not hold.
template <typename Has>
std::vector<int> all_but(const StreamMemory& memory, Has has) {
  std::vector<int> ranks;
  for (int r = 0; r < memory.size(); ++r)
    if (r != memory.rank && !has(r)) ranks.push_back(r);
  return ranks;
}
/// The ranks that have not folded so much of the operation in flight.
inline std::vector<int> not_folded(const StreamMemory& memory, uint64_t count) {
  return all_but(memory, [&](int r) {
    return reached(memory.page(r).folded, progress(memory.sequence(), count));
  });
}

/// A stay in other ranks' memory, to write there. A rank whose group fails takes its memory back
/// only when no rank is inside any more (Stream::others_are_out). So come in first, then look
/// whether the group is alive, and write only then.
class Visit {
 public:
  explicit Visit(const StreamMemory& memory) : inside_(memory.mine().inside.value) {
    inside_.store(1, std::memory_order_seq_cst);  // partner: Stream::others_are_out
    welcome_ = !memory.failed();
  }
  ~Visit() { inside_.store(0, std::memory_order_release); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  bool welcome() const { return welcome_; }

 private:
  std::atomic<uint64_t>& inside_;
  bool welcome_;
};

enum class Posts { waiting, same, different };
/// Whether all members have started the operation in flight, by what they have posted.
Posts compare_posts(const StreamMemory& memory);

}  // namespace farandole
