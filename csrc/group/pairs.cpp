#include "group/pairs.h"

#include <string>

namespace farandole {
namespace {

/// Streams of a group are numbered from 0 in the order of opening; those of pairs begin here.
constexpr uint64_t kFirstNumber = uint64_t{1} << 63;

Membership members_of(const Membership& group, const Pair& pair) {
  Membership two = group;
  two.members = {group.members[static_cast<size_t>(pair.from)],
                 group.members[static_cast<size_t>(pair.to)]};
  two.rank = group.rank == pair.from ? 0 : 1;
  return two;
}

std::string label_of(const Membership& group, const Pair& pair) {
  const bool sends = group.rank == pair.from;
  const int peer = group.members[static_cast<size_t>(sends ? pair.to : pair.from)];
  return (sends ? "to rank " : "from rank ") + std::to_string(peer) + ", tag " +
         std::to_string(pair.tag);
}

}  // namespace

uint64_t number_of(const Pair& pair, size_t size) {
  const uint64_t which = static_cast<uint64_t>(pair.from) * size + static_cast<uint64_t>(pair.to);
  return kFirstNumber | which << 32 | static_cast<uint32_t>(pair.tag);
}

std::shared_ptr<Stream> Pairs::known(const Pair& pair) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(pair);
  return found == streams_.end() ? nullptr : found->second;
}

std::shared_ptr<Stream> Pairs::stream(Engine& engine, const Membership& group, const Pair& pair) {
  const std::lock_guard lock(mutex_);
  auto& stream = streams_[pair];
  if (stream) return stream;
  if (streams_.size() > kMost) {
    streams_.erase(pair);
    throw Error(ErrorCode::resource,
                "this rank sends and receives by " + std::to_string(kMost) +
                    " combinations of direction, rank and tag already",
                {}, "use tags again: messages of one tag keep their order");
  }
  try {
    stream = engine.open_stream(members_of(group, pair), label_of(group, pair),
                                number_of(pair, group.members.size()), /*schedules=*/false);
  } catch (...) {
    streams_.erase(pair);
    throw;
  }
  return stream;
}

}  // namespace farandole
