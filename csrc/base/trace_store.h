// The memory of a trace: a file that its rank maps, `.rank-N.events`, so that what was recorded
// outlives the rank, however it ends. A process that finds the file can write the part that the
// rank would have written.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/fd.h"
#include "base/trace.h"

namespace farandole {

/// The head of the file. The struct is one build's: its size is part of `magic`.
struct TraceHead {
  static constexpr size_t kMostTracks = 1024;

  struct Row {  // a recording thread
    int64_t thread;
    char name[16];
    std::atomic<uint64_t> written;  // released after the event; the newest are there
  };
  struct Track {
    uint64_t key;
    char name[64];
  };

  uint64_t magic;
  uint64_t run;
  int32_t rank, size, process;
  char host[64];
  char tuning[32];
  std::atomic<uint64_t> refused;  // events lost for want of a row, or while writing
  std::atomic<uint32_t> rows, tracks;
  Row row[Trace::kMostThreads];
  Track track[kMostTracks];
};

class TraceStore {
 public:
  /// Makes the file anew, locked by this process for as long as it lives. Throws Error(resource).
  explicit TraceStore(const Trace::Identity& identity);
  /// Another's file. Throws Error(resource), also where it is none.
  explicit TraceStore(const std::string& path);
  /// One's own once more, to be read: to open it and to close it again would unlock it.
  TraceStore(const TraceStore& own);
  ~TraceStore();
  TraceStore& operator=(const TraceStore&) = delete;

  TraceHead& head() const { return *head_; }
  TraceEvent* events(size_t row) const { return events_ + row * Trace::kEventsPerThread; }
  /// Room for a row's events, or false: the disk is full.
  bool reserve(size_t row) const;
  int file() const { return file_.get(); }
  /// The file goes. What has it mapped may go on.
  void unlink();
  /// Gives the descriptor and the memory of the events back. The head stays: threads that still
  /// hold the trace count refused events there.
  void let_go();

  /// `rank-N.jsonl`, one Chrome trace event a line: of what there is. `still`: nobody writes, nor
  /// was killed as it wrote.
  std::string part(bool still) const;
  std::string part_name() const;
  const std::string& path() const { return path_; }

 private:
  void map(int file, int protection);

  std::string path_;  // empty once it is gone
  Fd file_;
  TraceHead* head_ = nullptr;
  TraceEvent* events_ = nullptr;
};

/// Reads what a rank on this host records, a little at a time, while it runs. One caller at a time.
class TraceFollower {
 public:
  /// Throws Error(resource), also where the file is none of this version.
  explicit TraceFollower(const std::string& events_file);
  explicit TraceFollower(const Trace& own);
  std::string host() const;
  /// The events recorded since the last call, one Chrome trace event a line, without those that the
  /// rank has overwritten meanwhile.
  std::string more();

 private:
  const TraceStore store_;
  bool introduced_ = false;  // its process
  uint32_t rows_ = 0, tracks_ = 0;
  std::array<uint64_t, Trace::kMostThreads> seen_{};  // events, by row
};

/// Writes the part of a rank's events file beside it, whole or not at all; removes the file if its
/// rank has ended. False where the rank lives and has locked it, and `living` is false.
bool recover_trace_part(const std::string& events_file, bool living);
/// For this user alone, whole or not at all. Throws Error(resource).
void write_trace_file(const std::string& directory, const std::string& name,
                      const std::string& text);

}  // namespace farandole
