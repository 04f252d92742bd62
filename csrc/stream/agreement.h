// How the members of a stream agree on its next operation, and what each knows of how far the
// others are.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "stream/stream_page.h"

namespace farandole {

/// The page of a closed stream, and who may still read it.
struct ClosedPage {
  struct Reader {
    int rank;  // in the world
    bool met;  // it has opened the stream: when it is no longer listed, it has closed it
  };
  uint64_t key;
  std::byte* memory;
  std::vector<Reader> readers;
};

/// Of all members' data together that go to all of them with the word of what they have started.
inline constexpr size_t kMostEagerBytes = 256 << 10;

/// Members are meant by their place in the group. Used by the thread that polls; nothing blocks.
class StreamAgreement {
 public:
  virtual ~StreamAgreement() = default;

  // ---- the life of an operation ----

  /// Whether all members can be asked; until then some of them are not there.
  virtual bool open() = 0;
  /// This rank starts the operation of that ticket (StreamMemory::ticket). Where it tells so in
  /// messages, they take up to kMostEagerBytes of `data` along, which stay as they are meanwhile.
  virtual void post(uint64_t ticket, std::span<const std::byte> data) = 0;
  /// Whether all members have started the same.
  virtual Posts compare() = 0;
  /// When they have: their data, by member. Empty where there are no messages.
  virtual std::span<const std::span<const std::byte>> data() const { return {}; }
  /// The ranks disagree: this is what this one has started.
  virtual void describe(const Descriptor& mine, std::span<const BundledArray> arrays) = 0;
  /// What all have started; nothing until the last of them has said so.
  virtual std::optional<std::vector<Shown>> described() = 0;
  /// Nobody reads what this rank has described any more.
  virtual bool settled() = 0;
  /// A member may be through with that before this rank knows what all have started.
  virtual bool others_may_settle_first() const { return false; }
  /// Operation `sequence` needs nothing more from this rank.
  virtual void complete(uint32_t sequence) = 0;

  // ---- what this rank knows of member r ----

  virtual bool has_opened(int r) const = 0;
  /// The newest operation it has started, and the newest that needs nothing more from it.
  virtual std::optional<uint32_t> begun(int r) const = 0;
  virtual std::optional<uint32_t> completed(int r) const = 0;
  /// Of one that has gone: nothing more will be known of it.
  virtual bool knows_all_of(int r) const = 0;
  /// Those whose word describe() and described() wait for.
  virtual std::vector<int> silent() const = 0;
  /// It may be writing into this rank's memory at this moment.
  virtual bool is_inside(int r) const = 0;

  // ---- whose data ranks wait for, for people ----

  virtual void show_holdups(std::span<const int> ranks, TimePoint when) = 0;
  /// Empty: none, or it has not said so lately.
  virtual std::vector<int> holdups_of(int r) const = 0;

  /// What is to be given back later, for a stream that is about to end; nothing: nothing is.
  virtual std::optional<ClosedPage> leave_behind() const = 0;
};

}  // namespace farandole
