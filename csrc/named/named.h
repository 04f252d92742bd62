// Operations keyed by name: submitted in any order on any rank, run in one order that all agree on.
//
//   submit (any thread)  ─inbox─►  the negotiator  ─order─►  launches  ─►  finished
//
// Everything behind the inbox is done by the thread that polls the engine; nothing there waits.
// Messages go between rank 0 and the others, whatever the sets. Each set has one stream for ordered
// operations.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "engine/engine.h"
#include "engine/task.h"
#include "group/group.h"
#include "named/launches.h"
#include "named/request.h"
#include "transport/message_link.h"

namespace farandole {

struct NamedOptions {
  size_t fusion_bytes = Config{}.fusion_bytes;
  size_t ids = Config{}.name_cache;
};

class Named : public Task {
 public:
  /// On every rank, at any time; waits for nobody. The engine keeps it.
  static std::shared_ptr<Named> open(Group& world, NamedOptions options);
  Named(Group& world, NamedOptions options);
  ~Named() override;

  // ---- any thread ----

  /// Registers a set; in the same order on every rank of the world, which all have done so before
  /// anyone submits in it. `group`: null on ranks outside. Returns its number; the world's is 0.
  uint32_t add_set(Group* group, std::vector<int> members);
  /// Nothing is submitted in it any more, on any rank.
  void remove_set(uint32_t set);

  /// How many members a set has, and which of them this rank is. Throws Error(invalid_argument) on
  /// others.
  std::pair<int, int> size_and_rank(uint32_t set);
  /// Whether an all_reduce or a broadcast of a tensor of so much is an operation by itself, on
  /// every rank.
  bool travels_alone(size_t bytes) const { return launches_.travels_alone(bytes); }
  /// Puts an operation on its way. Buffers stay the caller's to keep until it has finished.
  /// Throws Error(invalid_argument), also for a name that is in flight already.
  NamedRequest* submit(const NamedCall& call);
  /// Finishes when every rank of the world has joined; until then this one stands in.
  NamedRequest* join(NamedListener* listener = nullptr, bool waits = true);
  bool done(const NamedRequest& request) const {
    return request.finished.load(std::memory_order_acquire);
  }
  /// Drives the engine; false when `until` passes first. Does not throw the request's error.
  bool wait(NamedRequest& request, Deadline until);
  /// Gives a finished request back.
  void release(NamedRequest* request);
  /// The operations that wait for their order, in words.
  std::string describe();
  /// Drives until all messages that others need are sent, for a rank that leaves.
  void flush(Deadline until);
  /// For rank 0 that leaves: orders what others do in sets without it, until they have left, too.
  void serve(const std::function<void()>& interrupted);

  // ---- the thread that polls ----

  bool poll(TimePoint until) override;
  void look_around(TimePoint when) override;
  void list_waits(WaitList& list) const override;
  void fail_waits(const Error& error) override;

 private:
  struct Entry {
    Name name;
    NamedRequest* request = nullptr;  // in flight
  };
  struct HashText {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using Entries =
      std::unordered_map<std::string, std::unique_ptr<Entry>, HashText, std::equal_to<>>;
  struct SetState {
    NamedSet set;
    std::array<Entries, kCollectiveNames.size()> entries;      // by kind
    std::array<uint64_t, kCollectiveNames.size()> nameless{};  // submissions, by kind
    bool removed = false;
    int unordered = 0;  // of the polling thread: requests that wait for their order
  };

  SetState& set_for(uint32_t set);
  bool others_need_order();
  NamedRequest* take_request();
  void put_on_its_way(NamedRequest* request);
  void complete(NamedRequest& request);
  void tell(std::vector<NamedRequest*> requests);
  bool take_inbox();
  bool fail_failed();
  bool pass_messages();
  bool pass_messages_as_coordinator();
  bool pass_messages_as_member();
  bool poll_link(int rank);
  void apply(std::vector<Decision>& decisions);
  void apply_order(Decision& decision);
  void launch(Decision& decision, SetState& state);
  void check_rank(int rank) const;
  void give_up(const Error& error);
  void finish(std::vector<NamedRequest*>& requests);
  void part_from_name(NamedRequest& request);
  void fail_unordered(SetState& state, const Error& error);
  void hold_for(bool& held, bool needed);
  // watch.cpp
  void check_ranks();
  void check_joins();
  void check_requests(TimePoint when);
  void check_missing(TimePoint when);
  static std::string as_something_else(const Signature& signature,
                                       const std::vector<Coordinator::Waiting>& waiting);
  /// `mistake`: more evidence of what went wrong.
  void report(SetState& state, const Signature& signature, const std::vector<int>& missing,
              Duration age, const std::string& mistake);
  Duration patience_for(bool hung) const;
  std::string rank_text(int world_rank) const;

  Engine& engine_;
  NamedOptions options_;
  const int rank_;
  const Duration timeout_;

  mutable std::mutex mutex_;  // guards the inbox, names of entries at rest, sets_, the free list
  std::deque<std::shared_ptr<SetState>> sets_;
  std::vector<NamedRequest*> inbox_;
  std::vector<std::shared_ptr<SetState>> new_sets_;
  std::vector<uint32_t> removed_sets_;
  std::atomic<bool> inbox_full_{false};
  std::deque<NamedRequest> requests_;  // all there ever were
  std::vector<NamedRequest*> free_;
  std::atomic<int> unfinished_{0};
  bool joining_ = false;

  // State of the polling thread.
  std::vector<std::shared_ptr<SetState>> polled_sets_;
  Participant participant_;
  std::unique_ptr<Coordinator> coordinator_;         // rank 0 alone
  std::vector<std::unique_ptr<MessageLink>> links_;  // by rank; a member has the one to rank 0
  std::deque<NamedRequest*> joins_;
  Launches launches_;
  std::vector<Decision> decisions_;
  std::vector<NamedRequest*> finished_;
  bool holds_unsent_ = false, holds_listening_ = false;
  std::atomic<bool> unsent_{false};
  TimePoint next_check_{};
  int absent_ranks_ = 0;
  uint64_t begun_ = 0;                          // requests taken up
  std::map<uint64_t, TimePoint> next_warning_;  // by arrival at the coordinator
};

}  // namespace farandole
