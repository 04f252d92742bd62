#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <utility>

#include "control/failure_detector.h"
#include "named/negotiation_messages.h"
#include "named/negotiator.h"

namespace farandole {
namespace {

/// The note of the present offers: a name may be part of one call, and then of another.
constexpr auto note_of = [](const auto& tally) -> const std::string& {
  for (const auto& offer : tally.offers)
    if (offer.signature) return offer.signature->note;
  return tally.agreed.note;
};

}  // namespace

Coordinator::Coordinator(int ranks, size_t capacity)
    : capacity_(std::max<size_t>(capacity, 1)),
      joined_(static_cast<size_t>(ranks)),
      mail_(static_cast<size_t>(ranks)) {}

void Coordinator::add_set(uint32_t set, std::vector<int> members) {
  if (set >= sets_.size()) sets_.resize(set + 1);
  std::vector<int> rank_in_set(joined_.size(), -1);
  for (size_t m = 0; m < members.size(); ++m)
    rank_in_set[static_cast<size_t>(members[m])] = static_cast<int>(m);
  sets_[set] = {std::move(members), std::move(rank_in_set), false};
}

void Coordinator::drop_set(uint32_t set) {
  if (set >= sets_.size()) return;
  sets_[set].dropped = true;
  ++round_;
  std::erase_if(complete_, [&](const Tally* tally) { return tally->agreed.set == set; });
  std::erase_if(tallies_, [&](const auto& entry) {
    Tally& tally = *entry.second;
    if (tally.agreed.set != set) return false;
    forget_count(tally);
    if (tally.id == kNoId) return true;
    tell_forgotten(tally);
    by_id_[tally.id] = nullptr;
    free_ids_.push_back(tally.id);
    uses_.erase(tally.use);
    return true;
  });
  for (size_t r = 0; r < mail_.size(); ++r) close_message(static_cast<int>(r), true);
}

// ---- what ranks say ----

void Coordinator::receive(int rank, std::span<const std::byte> message, TimePoint when) {
  WireReader from(message);
  const uint64_t seen = get_message<OfferedHead>(from).seen;
  while (!from.done()) {
    switch (from.get_enum(Offered::join)) {
      case Offered::bits: {
        const auto offered = get_message<OfferedBits>(from);
        for (size_t w = 0; w < offered.bits.size(); ++w)
          for (uint64_t word = offered.bits[w]; word != 0; word &= word - 1)
            take_ready(rank,
                       offered.first + static_cast<uint32_t>(w * 64) +
                           static_cast<uint32_t>(std::countr_zero(word)),
                       seen, when);
        break;
      }
      case Offered::list:
        for (const auto offered = get_message<OfferedList>(from); const uint32_t id : offered.ids)
          take_ready(rank, id, seen, when);
        break;
      case Offered::full: {
        auto offered = get_message<OfferedFull>(from);
        take_full(rank, offered.number, std::move(offered.signature), when);
        break;
      }
      case Offered::join:
        take_join(rank, get_message<OfferedJoin>(from).when);
        break;
    }
  }
}

Coordinator::Set& Coordinator::set_of(uint32_t set, int rank) {
  if (set >= sets_.size() || sets_[set].rank_in_set.empty() ||
      sets_[set].rank_in_set[static_cast<size_t>(rank)] < 0)
    WireReader::malformed("rank " + std::to_string(rank) + " is no member of set " +
                          std::to_string(set));
  return sets_[set];
}

void Coordinator::take_ready(int rank, uint32_t id, uint64_t seen, TimePoint when) {
  if (id >= by_id_.size()) WireReader::malformed("id " + std::to_string(id) + " is unknown");
  Tally* tally = by_id_[id];
  if (tally == nullptr || seen < id_since_[id]) {  // it comes again, in full
    ++stale_;
    return;
  }
  const Set& set = set_of(tally->agreed.set, rank);
  Offer& offer = tally->offers[static_cast<size_t>(set.rank_in_set[static_cast<size_t>(rank)])];
  if (offer.state != Offer::State::none) WireReader::malformed("an id is offered twice");
  offer.state = Offer::State::ready;
  count(*tally, when);
}

void Coordinator::take_full(int rank, uint32_t number, Signature signature, TimePoint when) {
  const Set& set = set_of(signature.set, rank);
  if (set.dropped) return;
  check_signature(signature, set.members);
  Tally& tally = tally_of(signature);
  Offer& offer = tally.offers[static_cast<size_t>(set.rank_in_set[static_cast<size_t>(rank)])];
  if (offer.state != Offer::State::none) WireReader::malformed("a name is offered twice");
  offer.state = Offer::State::full;
  offer.number = number;
  offer.signature = std::make_unique<Signature>(std::move(signature));
  count(tally, when);
}

Coordinator::Tally& Coordinator::tally_of(const Signature& signature) {
  std::unique_ptr<Tally>& tally = tallies_[signature.key()];
  if (!tally) {
    tally = std::make_unique<Tally>();
    tally->agreed = signature;
    tally->offers.resize(sets_[signature.set].members.size());
  }
  return *tally;
}

void Coordinator::count(Tally& tally, TimePoint when) {
  if (tally.offered++ == 0) {
    tally.since = when;
    tally.arrival = arrivals_++;
    const bool barrier = tally.agreed.kind == Collective::barrier;
    tally.counted = barrier ? &barriers_ : note_of(tally).empty() ? nullptr : &parts_;
    if (tally.counted != nullptr) ++*tally.counted;
  }
  if (!note_if_complete(tally) && tally.counted != nullptr && parts_ > 0 && barriers_ > 0)
    end_abandoned(tally);
}

/// Whether it has just become complete.
bool Coordinator::note_if_complete(Tally& tally) {
  if (tally.complete || !is_complete(tally)) return false;
  tally.complete = true;
  complete_.push_back(&tally);
  return true;
}

void Coordinator::forget_count(Tally& tally) {
  if (tally.counted != nullptr) --*std::exchange(tally.counted, nullptr);
}

/// All members have offered it, or have joined.
bool Coordinator::is_complete(const Tally& tally) const {
  if (tally.offered == tally.offers.size()) return true;
  if (joined_count_ == 0) return false;
  return std::ranges::none_of(sets_[tally.agreed.set].members,
                              [&](int r) { return is_missing(tally, r); });
}

void Coordinator::take_join(int rank, int64_t when) {
  if (joined_[static_cast<size_t>(rank)]) WireReader::malformed("a rank joins twice");
  joined_[static_cast<size_t>(rank)] = true;
  if (joined_count_ == 0 || when >= last_join_at_) {
    last_joined_ = rank;
    last_join_at_ = when;
  }
  ++joined_count_;
  for (auto& [key, tally] : tallies_)
    if (tally->offered > 0) note_if_complete(*tally);
}

// ---- calls that were left ----

/// `tally`, which has just been offered and waits, may be a part of a call that some rank has left,
/// or the barrier by which that rank begins the next one.
void Coordinator::end_abandoned(Tally& tally) {
  if (tally.counted == &parts_) {
    Signature opener;
    opener.kind = Collective::barrier;
    opener.set = tally.agreed.set;
    opener.name = note_of(tally);
    const auto found = tallies_.find(opener.key());
    if (found != tallies_.end() && found->second->offered > 0)
      end_abandoned({&tally}, *found->second);
    return;
  }
  std::vector<Tally*> parts;
  for (const auto& [key, part] : tallies_)
    if (part->counted == &parts_ && !part->complete && part->agreed.set == tally.agreed.set &&
        note_of(*part) == tally.agreed.name)
      parts.push_back(part.get());
  if (!parts.empty()) end_abandoned(std::move(parts), tally);
}

void Coordinator::end_abandoned(std::vector<Tally*> parts, const Tally& opener) {
  constexpr size_t kMostNamed = 8;
  std::ranges::sort(parts, {}, &Tally::arrival);
  const Set& set = sets_[opener.agreed.set];
  const std::vector<int> left = present_of(opener);
  std::string names;
  for (size_t i = 0; i < parts.size() && i < kMostNamed; ++i)
    names += (i > 0 ? ", '" : "'") + parts[i]->agreed.name + "'";
  if (parts.size() > kMostNamed)
    names += " and " + std::to_string(parts.size() - kMostNamed) + " more";
  Context where;
  where.rank = left.front();
  where.operation = opener.agreed.name;
  where.tensor = parts.front()->agreed.name;
  where.evidence = "never came from all ranks: " + names;
  where.values = {{"abandoned", left}};
  const Error error(ErrorCode::remote_error,
                    "'" + opener.agreed.name + "' was abandoned half-way on rank" +
                        (left.size() > 1 ? "s " : " ") + describe_ranks(left),
                    std::move(where),
                    "look at the error on that rank; skip this step on every rank, or restart");
  for (Tally* part : parts) {
    refuse(*part, set, error);
    reset(*part);
  }
  for (const int member : set.members) close_message(member, true);
}

// ---- the same name for different things ----

bool Coordinator::has_offered(const Tally& tally, int rank) const {
  const int member = sets_[tally.agreed.set].rank_in_set[static_cast<size_t>(rank)];
  return member >= 0 && tally.offers[static_cast<size_t>(member)].state != Offer::State::none;
}

std::vector<int> Coordinator::present_of(const Tally& tally) const {
  std::vector<int> present;
  std::ranges::copy_if(sets_[tally.agreed.set].members, std::back_inserter(present),
                       [&](int r) { return has_offered(tally, r); });
  return present;
}

bool Coordinator::is_missing(const Tally& tally, int rank) const {
  const int member = sets_[tally.agreed.set].rank_in_set[static_cast<size_t>(rank)];
  return member >= 0 && !joined_[static_cast<size_t>(rank)] && !has_offered(tally, rank);
}

/// Each waits for a rank that has submitted the other one instead.
bool Coordinator::are_crossed(const Tally& a, const Tally& b) const {
  bool instead_of_a = false, instead_of_b = false;
  for (int r = 0; r < static_cast<int>(joined_.size()); ++r) {
    instead_of_a |= is_missing(a, r) && has_offered(b, r);
    instead_of_b |= is_missing(b, r) && has_offered(a, r);
  }
  return instead_of_a && instead_of_b;
}

void Coordinator::refuse_crossed(TimePoint before) {
  std::map<std::string, std::vector<Tally*>> by_name;
  for (const auto& [key, tally] : tallies_)
    if (tally->offered > 0 && !tally->complete && tally->since <= before)
      by_name[tally->agreed.name].push_back(tally.get());
  for (auto& [name, tallies] : by_name) {
    std::ranges::sort(tallies, {}, [&](const Tally* tally) { return present_of(*tally).front(); });
    for (size_t i = 1; i < tallies.size(); ++i)
      if (are_crossed(*tallies[i - 1], *tallies[i])) {
        refuse_both(*tallies[i - 1], *tallies[i]);
        break;  // both are gone
      }
  }
}

void Coordinator::refuse_both(Tally& a, Tally& b) {
  const bool of_sets = a.agreed.kind == b.agreed.kind;
  Context where;
  where.operation = name_of(a.agreed.kind);
  where.tensor = a.agreed.name;
  for (const Tally* tally : {&a, &b}) {
    const std::vector<int>& members = sets_[tally->agreed.set].members;
    where.values.emplace_back(
        of_sets ? "ranks " + describe_ranks(members) : std::string(name_of(tally->agreed.kind)),
        present_of(*tally));
  }
  where.rank = odd_one(where.values);
  const std::string what =
      of_sets ? "process set of " + a.agreed.title() : "operation of '" + a.agreed.name + "'";
  const Error error(ErrorCode::mismatch,
                    "ranks disagree on the " + what + ": " + describe_values(where.values), where,
                    "call the same by that name on every rank");
  for (Tally* tally : {&a, &b}) {
    refuse(*tally, sets_[tally->agreed.set], error);
    reset(*tally);
  }
  for (size_t r = 0; r < mail_.size(); ++r) close_message(static_cast<int>(r), true);
}

// ---- what is missing ----

std::vector<int> Coordinator::not_joined() const {
  std::vector<int> ranks;
  for (size_t r = 0; joined_count_ > 0 && r < joined_.size(); ++r)
    if (!joined_[r]) ranks.push_back(static_cast<int>(r));
  return ranks;
}

std::vector<Coordinator::Waiting> Coordinator::waiting() const {
  std::vector<Waiting> all;
  for (const auto& [key, tally] : tallies_) {
    if (tally->offered == 0) continue;
    Waiting one{&tally->agreed, tally->since, {}, {}, tally->arrival};
    const std::vector<int>& members = sets_[tally->agreed.set].members;
    for (size_t m = 0; m < members.size(); ++m)
      (tally->offers[m].state == Offer::State::none ? one.missing : one.present)
          .push_back(members[m]);
    all.push_back(std::move(one));
  }
  std::ranges::sort(all, {}, &Waiting::arrival);
  return all;
}

void Coordinator::tell_late(const Waiting& what) {
  const auto found = tallies_.find(what.signature->key());
  if (found == tallies_.end()) return;
  const Tally& tally = *found->second;
  const std::vector<int>& members = sets_[tally.agreed.set].members;
  for (size_t m = 0; m < members.size(); ++m) {
    if (tally.offers[m].state == Offer::State::none) continue;
    put_as<OrderedLate>(record(members[m], OrderedLate::kTag), reference_to(tally, tally.offers[m]),
                        what.missing);
    close_message(members[m], true);
  }
}

}  // namespace farandole
