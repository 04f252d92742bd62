// How ranks that submit operations by name, in any order, agree on one order of them.
//
//   member                               rank 0, the coordinator
//     submit 'x' ──ready: bit of its id──►  counts members that have submitted it
//         (a name or description that is new: all of it, once)
//     run 'x'    ◄──round: ids in order──   when all members of its set have
//
// Both ends are values that turn messages into messages: no clock, no socket, no thread. A message
// is bytes; every pair of ends keeps the order of its messages, and that is all that is asked.
//
// An id is a number for a name and the signature that all members agreed on. Ids are bounded: the
// one longest unused is taken back, from all members in the same round. A member that had already
// offered it when the news came offers the name again in full; the coordinator knows such stale
// offers by the newest round that their sender had seen.
//
// A barrier may open a call of several operations, whose notes are its name. A rank that comes to
// the barrier again has left its call: its operations that still wait can never be complete, and
// are refused.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/wire.h"
#include "named/negotiation_words.h"
#include "named/signature.h"

namespace farandole {

inline constexpr uint32_t kNoId = ~uint32_t{0};

struct Reference;

/// A name on one rank. Between submit() and the decision on it nothing of it may change.
struct Name {
  Signature signature;
  bool agreed = false;           // the id stands for exactly this signature
  uint32_t id = kNoId;           // written by the participant alone, as all that follows
  std::vector<int64_t> extents;  // of all members, as they were agreed
  enum class State : uint8_t { resting, queued, offered } state = State::resting;
  uint32_t number = 0;  // of an offer in full
  void* owner = nullptr;
};

/// One decision of the order, as one rank receives it.
struct Decision {
  enum class What : uint8_t {
    run,        // the next operation is `name`
    by_proxy,   // the next one is `signature`, for which this rank has joined
    refuse,     // the ranks disagree about `name`
    late,       // `ranks` have not submitted `name` yet
    forget,     // `name` has no id any more
    joined,     // all ranks have; `last` was the last
    round_end,  // the decisions since the last one were ordered together
  };
  struct More {
    Signature signature;
    std::vector<int64_t> extents;
    bool once = false;  // these extents hold, not those of the name
    std::vector<Error> error;
    std::vector<int> ranks;
    int last = -1;
  };
  What what;
  Name* name = nullptr;
  std::unique_ptr<More> more{};  // null for a name that runs on the signature agreed before
};

/// One rank's end.
class Participant {
 public:
  void submit(Name& name);
  /// This rank takes part as a stand-in until all ranks have joined. `when`: of the call; what
  /// comes through may be overtaken by steps that this rank stands in for.
  void join(TimePoint when) { joins_ = when; }
  /// The next message for the coordinator; false when there is nothing to say.
  bool take_message(std::vector<std::byte>& message);
  /// Appends what the coordinator's message decides. Throws Error(link) when it is malformed.
  void receive(std::span<const std::byte> message, std::vector<Decision>& decisions);

 private:
  void put_ready(WireWriter& to);
  bool put_offers(WireWriter& to);
  Name* look_for(const Reference& reference);
  Name* decided(const Reference& reference);
  void decide_runs(WireReader& from, std::vector<Decision>& decisions);
  void decide_agreed(WireReader& from, std::vector<Decision>& decisions);
  void forget(WireReader& from, std::vector<Decision>& decisions);

  void decide(Ordered tag, WireReader& from, std::vector<Decision>& decisions);

  uint64_t seen_ = 0;             // the newest round that came
  std::vector<std::byte> parts_;  // of a round that has not come whole: nothing of it holds yet
  std::optional<TimePoint> joins_;
  std::vector<uint32_t> ready_;  // ids to be offered
  std::vector<Name*> queued_;    // names to be offered in full
  std::vector<Name*> by_id_;
  std::unordered_map<uint32_t, Name*> by_number_;
  uint32_t next_number_ = 0;
};

/// Rank 0's end, which serves all ranks.
class Coordinator {
 public:
  Coordinator(int ranks, size_t capacity);

  /// Members are world ranks in ascending order. Set 0 is the world.
  void add_set(uint32_t set, std::vector<int> members);
  /// Nothing of this set will be ordered any more.
  void drop_set(uint32_t set);
  /// Throws Error(link) when the message is malformed.
  void receive(int rank, std::span<const std::byte> message, TimePoint when);
  /// Ends a round: whatever is complete is ordered.
  void order();
  /// The next message for `rank`; false when there is nothing to say.
  bool take_message(int rank, std::vector<std::byte>& message);

  /// An operation that some members have submitted and others have not.
  struct Waiting {
    const Signature* signature;
    TimePoint since;
    std::vector<int> present, missing;
    uint64_t arrival;  // tells operations apart
  };
  std::vector<Waiting> waiting() const;
  /// Notifies the ranks that have submitted it of those that have not.
  void tell_late(const Waiting& what);
  /// Refuses, on all who have submitted them, operations of one name that wait since `before` for
  /// each other's ranks: another collective, or in another set. Names of these do not meet, so it
  /// may also be that both come everywhere, only very late.
  void refuse_crossed(TimePoint before);
  /// Ranks that have not joined; none while nobody has.
  std::vector<int> not_joined() const;
  size_t ids() const { return by_id_.size() - free_ids_.size(); }
  /// Offers by ids that had been taken back meanwhile.
  size_t stale() const { return stale_; }

 private:
  struct Offer {
    enum class State : uint8_t { none, ready, full } state = State::none;
    uint32_t number = 0;
    std::unique_ptr<Signature> signature;
  };
  struct Tally {
    Signature agreed;
    std::vector<int64_t> extents;
    uint32_t id = kNoId;
    std::vector<Offer> offers;  // by member
    size_t offered = 0;
    TimePoint since{};
    uint64_t arrival = 0;
    bool complete = false;   // is in complete_
    int* counted = nullptr;  // parts_ or barriers_, while it is offered
    std::list<Tally*>::iterator use{};
  };
  struct Set {
    std::vector<int> members;
    std::vector<int> rank_in_set;  // by world rank; -1: no member
    bool dropped = false;
  };
  struct Mailbox {
    WireWriter body;
    std::vector<uint32_t> runs;  // first id and count of each, not yet in the body
    bool unfinished = false;     // parts of this round have gone, and not the last
    std::list<std::vector<std::byte>> messages{};
  };

  Set& set_of(uint32_t set, int rank);
  Tally& tally_of(const Signature& signature);
  void take_ready(int rank, uint32_t id, uint64_t seen, TimePoint when);
  void take_full(int rank, uint32_t number, Signature signature, TimePoint when);
  void take_join(int rank, int64_t when);
  void count(Tally& tally, TimePoint when);
  bool note_if_complete(Tally& tally);
  void forget_count(Tally& tally);
  bool has_offered(const Tally& tally, int rank) const;
  std::vector<int> present_of(const Tally& tally) const;
  bool is_missing(const Tally& tally, int rank) const;
  bool are_crossed(const Tally& a, const Tally& b) const;
  void refuse_both(Tally& a, Tally& b);
  void end_abandoned(Tally& tally);
  void end_abandoned(std::vector<Tally*> parts, const Tally& opener);
  bool is_complete(const Tally& tally) const;
  void settle(Tally& tally);
  void agree(Tally& tally, const Set& set, std::span<const Signature* const> by_member,
             bool absent);
  void refuse(Tally& tally, const Set& set, const Error& error);
  void reset(Tally& tally);
  void claim_id(Tally& tally);
  void put_run(int rank, uint32_t id);
  void put_runs(Mailbox& mail);
  void begin_message(Mailbox& mail);
  WireWriter& record(int rank, Ordered tag);
  void tell_forgotten(const Tally& tally);
  static Reference reference_to(const Tally& tally, const Offer& offer);
  void close_message(int rank, bool last);

  size_t capacity_;
  std::vector<Set> sets_;
  std::unordered_map<std::string, std::unique_ptr<Tally>> tallies_;  // by set, kind and name
  std::vector<Tally*> by_id_;                                        // null: free
  std::vector<uint64_t> id_since_;  // the round from which an id means what it means
  std::vector<uint32_t> free_ids_;
  std::list<Tally*> uses_;  // those with ids, the longest unused first
  std::vector<Tally*> complete_;
  int parts_ = 0, barriers_ = 0;  // of calls, and what may open them: that some member has offered
  std::vector<bool> joined_;
  size_t joined_count_ = 0;
  int last_joined_ = -1;
  int64_t last_join_at_ = 0;  // of the clock that ranks of a host share
  uint64_t round_ = 0, arrivals_ = 0;
  size_t stale_ = 0;
  std::vector<Mailbox> mail_;
};

}  // namespace farandole
