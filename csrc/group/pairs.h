// Point-to-point: a stream for every (from, to, tag), on which the two ranks run broadcasts from
// the sender. Deadlines, deaths, disagreement and traces are those of any stream.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "engine/engine.h"

namespace farandole {

/// One direction between two ranks of a group. Sends meet receives in the order of submission.
struct Pair {
  int from = 0, to = 0;  // group ranks
  int tag = 0;

  auto operator<=>(const Pair&) const = default;
};

/// Among the streams of a group of `size` ranks.
uint64_t number_of(const Pair& pair, size_t size);

/// Streams are kept while their group lives: closing one needs the agreement of both ends. There
/// are at most kMost of them in a group on a rank, so memory is bounded (0.8 MiB of arena each, of
/// which only what data touched is real).
class Pairs {
 public:
  static constexpr size_t kMost = 256;

  /// The pair's stream, opened by the first that needs it. Any thread. Throws Error(resource) when
  /// there are too many.
  std::shared_ptr<Stream> stream(Engine& engine, const Membership& group, const Pair& pair);

  /// The same if it is open; null: not yet.
  std::shared_ptr<Stream> known(const Pair& pair);

 private:
  std::mutex mutex_;  // guards streams_
  std::map<Pair, std::shared_ptr<Stream>> streams_;
};

}  // namespace farandole
