// The communicator: the collectives among some ranks of the world, in program order.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "engine/engine.h"
#include "group/any_source.h"
#include "group/arguments.h"
#include "group/pack.h"
#include "group/pairs.h"
#include "transport/buffer_pool.h"

namespace farandole {

struct GroupDefaults {
  Duration timeout = duration_of(Config{}.timeout);  // zero: for ever
  Determinism level = Determinism::canonical;
  std::string algorithm;
  /// Asked now and then while the group is created; throws to give up.
  std::function<void()> interrupted = [] {};
};

/// A collective on equal shares, of whatever the group does by default.
struct PlainCall {
  CollectiveSpec spec;
  Buffer input, output;

  bool operator==(const PlainCall&) const = default;
};

/// Any collective.
struct CollectiveCall {
  Operand operand;
  Options options;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  /// All ranks; on one host it blocks until rank 0 has made the group.
  static std::shared_ptr<Group> world(std::shared_ptr<Engine> engine, GroupDefaults defaults,
                                      Deadline deadline);

  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return membership_.rank; }
  int size() const { return static_cast<int>(membership_.members.size()); }
  const std::vector<int>& members() const { return membership_.members; }  // world ranks
  const std::shared_ptr<Engine>& engine() const { return engine_; }

  /// Checks the operation on this rank and puts it into program order. `caller_waits`: it
  /// will wait for it at once. Throws Error(invalid_argument) before anything is sent.
  Handle submit(Buffer input, Buffer output, Options options, bool caller_waits = false);
  /// The same, in a stream of its own order, by any thread.
  Handle submit_to(const std::shared_ptr<Stream>& stream, Buffer input, Buffer output,
                   Options options, bool caller_waits = false);
  /// submit() for a caller that waits at once: drives for at most `looks` looks. An empty handle
  /// means that the operation is complete. Throws its error. What says the same as the call before
  /// it is not checked again: that would be a tenth of the smallest operations' time.
  Handle run(const PlainCall& call, int looks);
  /// submit_to() for a caller that waits a little later: drives at once for at most
  /// `looks` looks.
  Handle begin_on(const std::shared_ptr<Stream>& stream, CollectiveCall call, int looks);

  /// All or nothing: none is sent unless every one is valid. Handles are in the order of the calls.
  std::vector<Handle> submit_all(std::vector<CollectiveCall> calls, bool caller_waits = false);
  /// The same for what is one call called `name`: ranks that give others are refused all of them
  /// (stream/bundle.h).
  std::vector<Handle> submit_together(const std::string& name, std::vector<CollectiveCall> calls);

  /// This rank's end of a transfer between two ranks: Collective::send to `peer`, or recv from it.
  /// Messages of one direction and tag meet in the order of submission; others do not wait for
  /// them. Complete when the receiver has the data.
  Handle submit_between(int peer, int tag, Buffer data, Options options, bool caller_waits = false);

  /// The same for the first rank that sends by this tag; senders are served in turn. A death in the
  /// group ends it, as it ends all that the dead rank may be part of. The number is the sender's,
  /// once it is complete.
  std::pair<Handle, std::shared_ptr<const int>> submit_from_any(int tag, Buffer data,
                                                                Options options = {});

  /// A stream of its own order, for a Reducer or a traced program. Opened in the same order on
  /// every member; waits for nobody.
  std::shared_ptr<Stream> open_stream(std::string label);
  /// The stream that operations by name run on: opened by the first that needs it, since its
  /// number is its own.
  std::shared_ptr<Stream> stream_of_names();
  /// The stream of submit(), run() and submit_all().
  const std::shared_ptr<Stream>& program_order() const { return program_order_; }
  const Membership& membership() const { return membership_; }
  const GroupDefaults& defaults() const { return defaults_; }
  /// Members that give the same color form a group, ordered by key, then rank; a negative color
  /// joins none (nullptr). Collective; blocks until all members have come.
  /// `interrupted` is asked ten times a second and throws to give up, which fails this group.
  std::shared_ptr<Group> split(
      int color, int key, Deadline deadline, const std::function<void()>& interrupted = [] {});
  /// The group of some members, ranks of this group in the new order, made by these alone. They
  /// give the same `token`, which no group formed out of this one has had before. Blocks until the
  /// first of them has come.
  std::shared_ptr<Group> form(const std::vector<int>& ranks, uint64_t token, Deadline deadline);
  /// Waits for an operation on memory that the caller takes back. `interrupted` is asked ten times
  /// a second and throws to give up, which fails this group.
  void wait_for(const Handle& handle, const std::function<void()>& interrupted);
  /// Fails this group on every member with this error.
  void abort(const Error& error);
  /// The same, and throws what all ranks are told: the first that any of them has reported.
  [[noreturn]] void fail(const Error& error);
  /// The same, for a rank that a signal has interrupted, whose handler raised this.
  void abort_interrupted(const std::string& by = "KeyboardInterrupt");
  /// Throws the verdict of a group that has failed.
  void check() const;

  /// Memory that all ranks of the host map, zero at first; released with the last owner.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  /// Such memory, not cleared, lent.
  BufferPool& pool() { return pool_; }
  std::string describe() const;
  /// How the newest operation was run, in program order or between two ranks.
  std::string_view last_way() const { return newest_.load()->last_way(); }

 private:
  Group(std::shared_ptr<Engine> engine, std::vector<int> members, uint64_t key,
        GroupDefaults defaults, Deadline deadline);
  void share_fate_in_memory(Deadline deadline);
  void share_fate_over_mesh();
  void prepare(Operation& operation, const Stream& stream, Buffer input, Buffer output,
               Options&& options) const;
  void fill(Operation& operation, Options&& options) const;
  Operation end_of_transfer(int tag, Buffer data, Options&& options) const;

  std::shared_ptr<Engine> engine_;
  GroupDefaults defaults_;
  Membership membership_;
  std::shared_ptr<Stream> program_order_;
  std::shared_ptr<Stream> names_;
  std::shared_ptr<Pairs> pairs_ = std::make_shared<Pairs>();
  std::once_flag any_source_made_;
  std::shared_ptr<AnySource> any_source_;       // made when it is first asked for
  std::atomic<const Stream*> newest_{nullptr};  // of program_order_ or pairs_
  BufferPool pool_;
  std::atomic<bool> submitting_{false};
  // For run() alone, guarded by submitting_: the request of the call before (null while in use),
  // and that call.
  std::shared_ptr<Request> spare_;
  PlainCall checked_;
  uint64_t next_stream_ = 1;
  uint64_t splits_ = 0;
};

}  // namespace farandole
