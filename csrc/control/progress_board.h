// Progress of streams between ranks that share no memory, by question and answer.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace farandole {

/// How far a rank is in one stream.
struct StreamProgress {
  uint32_t begun = 0, completed = 0;  // the newest operation it has started; that needs it no more
  std::vector<int> holdups;           // members whose data it waits for
  bool operator==(const StreamProgress&) const = default;
};

/// What a rank answers.
struct StreamAnswer {
  std::optional<StreamProgress> progress;  // nothing: it has not opened the stream
  bool closed = false;                     // it has closed the group: the progress is final
  bool operator==(const StreamAnswer&) const = default;
};

/// Any thread.
class ProgressBoard {
 public:
  virtual ~ProgressBoard() = default;
  /// Shows this rank's progress to ranks that ask.
  virtual void show(uint64_t stream_key, const StreamProgress& mine) = 0;
  virtual void forget(uint64_t stream_key) = 0;
  /// Asks about a stream of the group whose verdict has the key `fate`; the answer comes later.
  virtual void ask(uint64_t stream_key, uint64_t fate, int world_rank) = 0;
  /// The newest answer; empty: none has come.
  virtual StreamAnswer told(uint64_t stream_key, int world_rank) const = 0;
  /// It has sent its last message, or its connection has ended: its last answer is final.
  virtual bool has_finished(int world_rank) const = 0;
};

}  // namespace farandole
