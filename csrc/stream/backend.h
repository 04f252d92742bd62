// A way to run whole collectives on one stream.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "stream/operation.h"
#include "transport/channel.h"

namespace farandole {

enum class Progress { idle, moved, finished };

/// One instance serves one stream and holds at most one operation at a time. Used only by the
/// thread that polls the engine; start() and poll() never block. A call may throw Error, which
/// fails the stream's group.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  /// Decided from what all ranks share: kind, counts, dtype, algorithm, level; never from pointers.
  virtual bool can_run(const Operation& operation) const = 0;
  /// Throws Error(invalid_argument), saying why it cannot, where the operation asks by name for a
  /// way that is this backend's.
  virtual void refuse(const Operation& operation) const = 0;
  /// The ways that could run it, for the advice of another backend's refusal.
  virtual std::string ways_for(const Operation& operation) const = 0;
  /// `sequence` counts the stream's operations; `operation` outlives the run. The other ranks may
  /// not have come yet, or have started something else: no data of theirs is looked at.
  virtual void start(const Operation& operation, uint32_t sequence) = 0;
  /// True when the data of the started operation carry the ranks' agreement with them; else the
  /// stream compares descriptors first, then calls agreed(), and only then poll().
  virtual bool agrees_in_data() const { return false; }
  /// This rank's data of the started operation that all others get with the messages of the
  /// agreement, if ranks agree by messages.
  virtual std::span<const std::byte> eager_data() const { return {}; }
  /// Called before agreed(): all ranks' data, by group rank. They stay until the next operation.
  virtual void arrived(std::span<const std::span<const std::byte>>) {}
  /// All ranks have started the same operation. An Error thrown here is thrown on every rank; the
  /// operation is refused and the group lives on.
  virtual void agreed() {}
  /// Works in pieces of at most 128 KiB and looks at the clock between them.
  virtual Progress poll(TimePoint until) = 0;
  /// After a poll() that has finished: why it ran nothing, in the same words on every rank, so that
  /// the operation goes by the host (OnDevices). Empty: it ran.
  virtual std::string declined() const { return {}; }
  /// After an idle poll(), for people: the members (by place in the group) whose bytes or flags it
  /// waits for.
  virtual std::vector<int> lacking() const = 0;
  /// Whether it reports itself that the operation in flight is late.
  virtual bool minds_deadline() const { return false; }
  /// Forgets the operation in flight; afterwards touches no memory of any caller, but as let_go()
  /// says.
  virtual void abort() noexcept = 0;
  /// After abort(): whether the operation's memory is still in use. Asked until it is not held for
  /// now.
  virtual Held let_go() noexcept { return Held::no; }
  /// How the last operation was run, as `algorithm` would name it; a literal.
  virtual std::string_view way() const = 0;
};

}  // namespace farandole
