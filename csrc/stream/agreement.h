// How the members of a stream agree on its next operation, and what each knows of how far the
// others are.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "stream/stream_page.h"

namespace farandole {

/// The page of a closed stream, and the ranks that may still read it.
struct ClosedPage {
  struct Reader {
    int rank;  // in the world
    bool met;  // it has opened the stream: when it is no longer listed, it has closed it
  };
  uint64_t key;
  std::byte* memory;
  std::vector<Reader> readers;
};

/// Most bytes of data, of all members together, that travel with the messages of the agreement.
inline constexpr size_t kMostEagerBytes = 256 << 10;

/// Members are meant by their place in the group. Used by the thread that polls; nothing blocks.
class StreamAgreement {
 public:
  virtual ~StreamAgreement() = default;

  // ---- the life of an operation ----

  /// Whether all members can be asked; until then some of them are not there.
  virtual bool open() = 0;
  /// This rank starts the operation of that ticket (StreamMemory::ticket). If ranks agree by
  /// messages, these carry up to kMostEagerBytes of `data`, which must not change meanwhile.
  virtual void post(uint64_t ticket, std::span<const std::byte> data) = 0;
  /// Whether all members have started the same.
  virtual Posts compare() = 0;
  /// When they have: their data, by member. Empty where there are no messages.
  virtual std::span<const std::span<const std::byte>> data() const { return {}; }
  /// Shows the operation that this rank has started, since the ranks disagree.
  virtual void describe(const Descriptor& mine, std::span<const BundledArray> arrays) = 0;
  /// The operations that all members have started; nothing until all have shown theirs.
  virtual std::optional<std::vector<Shown>> described() = 0;
  /// Whether no member reads this rank's description any more.
  virtual bool settled() = 0;
  /// Whether a member may finish comparing before this rank knows all descriptions.
  virtual bool others_may_settle_first() const { return false; }
  /// Operation `sequence` needs nothing more from this rank.
  virtual void complete(uint32_t sequence) = 0;

  // ---- what this rank knows of member r ----

  virtual bool has_opened(int r) const = 0;
  /// The newest operation it has started, and the newest that needs nothing more from it.
  virtual std::optional<uint32_t> begun(int r) const = 0;
  virtual std::optional<uint32_t> completed(int r) const = 0;
  /// Whether all that a member did before it went is known here: nothing more will come.
  virtual bool knows_all_of(int r) const = 0;
  /// Whether the member has closed the group: begun() is the last that it begins.
  virtual bool has_closed(int r) const = 0;
  /// The members whose descriptions described() waits for.
  virtual std::vector<int> silent() const = 0;
  /// Whether the member may be writing into this rank's memory at this moment.
  virtual bool is_inside(int r) const = 0;

  // ---- whose data ranks wait for, for people ----

  virtual void show_holdups(std::span<const int> ranks, TimePoint when) = 0;
  /// Empty: none, or the member has shown nothing lately.
  virtual std::vector<int> holdups_of(int r) const = 0;

  /// The page to be released later, of a stream that is about to end; nothing if there is none.
  virtual std::optional<ClosedPage> leave_behind() const = 0;
};

}  // namespace farandole
