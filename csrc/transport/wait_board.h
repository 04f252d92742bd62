// The operations that a rank waits in, shown to others: for their messages, and for the search of
// circles of ranks that wait for each other (control/wait_watch.h).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/fixed_text.h"

namespace farandole {

/// Words that one thread of one process writes, and any thread of any process reads whole.
template <size_t Words>
class SharedRecord {
 public:
  static constexpr size_t kWords = Words;

  void write(std::span<const uint64_t> words) {
    const uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);  // odd: being written
    std::atomic_thread_fence(std::memory_order_release);     // partner: read
    const size_t count = std::min(words.size(), Words);
    count_.store(count, std::memory_order_relaxed);
    for (size_t i = 0; i < count; ++i) words_[i].store(words[i], std::memory_order_relaxed);
    version_.store(version + 2, std::memory_order_release);
  }
  /// Nothing: never written, or its writer does not finish (it may be stopped).
  std::optional<std::vector<uint64_t>> read() const {
    for (int tries = 0; tries < 8; ++tries) {
      const uint64_t version = version_.load(std::memory_order_acquire);
      if (version == 0) return std::nullopt;
      if (version % 2 != 0) continue;
      std::vector<uint64_t> words(
          std::min<uint64_t>(count_.load(std::memory_order_relaxed), Words));
      for (size_t i = 0; i < words.size(); ++i)
        words[i] = words_[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (version_.load(std::memory_order_relaxed) == version) return words;
    }
    return std::nullopt;
  }

 private:
  std::atomic<uint64_t> version_{0}, count_{0};
  std::array<std::atomic<uint64_t>, Words> words_{};
};

/// One operation that this rank has begun and others have not. Eight words.
struct Wait {
  enum Kind : uint32_t {
    all,     // it needs every one of `ranks`
    any,     // one of `ranks` is enough
    named,   // it needs those of `ranks` that do not show the same key
    moving,  // it may come to its end by itself
  };
  static constexpr size_t kRanks = 16;  // of more, the first: then fewer circles are found

  uint64_t key = 0;
  uint64_t sequence = 0;
  uint32_t kind = moving;
  uint32_t count = 0;  // of ranks
  std::array<uint16_t, kRanks> ranks{};
  uint64_t spare = 0;

  void need(int world_rank) {
    if (count < kRanks) ranks[count++] = static_cast<uint16_t>(world_rank);
  }
  std::span<const uint16_t> needed() const {
    return {ranks.data(), std::min<size_t>(count, kRanks)};
  }
  bool operator==(const Wait&) const = default;
};
static_assert(sizeof(Wait) == 64);

/// The state of the program's threads, as its watch sees it (python/farandole/_watch.py).
struct ThreadReport {
  enum State : uint64_t {
    free,      // some thread runs, or will run by itself
    blocked,   // none will, unless an operation ends
    daemonic,  // none will but daemons, which have not waited for ranks
  };
  int64_t looked = 0;       // nanoseconds of the clock that all processes of a host share
  int64_t still_since = 0;  // no thread has moved from there
  int64_t stands = 0;       // the same, by the clock of its own host
  uint64_t state = free;
  char place[232] = {};  // "train.py, line 12, in main"
  char step[128] = {};   // "in batch 17 of epoch 1", where the loop is known
};
static_assert(sizeof(ThreadReport) % sizeof(uint64_t) == 0);

inline constexpr size_t kMostWaits = 1024;
inline constexpr size_t kMostTitles = 3;
struct WaitTitle {
  char text[192] = {};
};
struct WaitHead {
  int64_t looked = 0;
  int64_t still_since = 0;
  int64_t stands = 0;     // as in ThreadReport
  uint64_t complete = 0;  // all that this rank waits in stands here
  uint64_t titles = 0, waits = 0;
};
inline constexpr size_t kWaitWords =
    (sizeof(WaitHead) + kMostTitles * sizeof(WaitTitle) + kMostWaits * sizeof(Wait)) / 8;

/// An error of this rank that another one has found, and the time since which this rank stood still
/// then, by its own clock.
struct SentVerdict {
  static constexpr size_t kWords = 350;
  std::atomic<uint64_t> state{0};  // 0: none; 1: being written; 2: stands
  SharedRecord<kWords> words;
};

struct WaitBoard {
  SharedRecord<kWaitWords> waits;                  // by the thread that polls
  SharedRecord<sizeof(ThreadReport) / 8> threads;  // by the watch
  SentVerdict verdict;                             // by another rank
  std::atomic<uint32_t> asked{0};                  // a futex: the watch is to look
  std::atomic<uint32_t> over{0};                   // and to end
};

}  // namespace farandole
