#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <utility>

#include "control/failure_detector.h"
#include "named/negotiation_words.h"
#include "named/negotiator.h"

namespace farandole {
namespace {

/// That of what is offered now: a name may be part of one call, and then of another.
constexpr auto note_of = [](const auto& slot) -> const std::string& {
  for (const auto& offer : slot.offers)
    if (offer.signature) return offer.signature->note;
  return slot.agreed.note;
};

}  // namespace

Coordinator::Coordinator(int ranks, size_t capacity)
    : capacity_(std::max<size_t>(capacity, 1)),
      joined_(static_cast<size_t>(ranks)),
      mail_(static_cast<size_t>(ranks)) {}

void Coordinator::add_set(uint32_t set, std::vector<int> members) {
  if (set >= sets_.size()) sets_.resize(set + 1);
  std::vector<int> place(joined_.size(), -1);
  for (size_t m = 0; m < members.size(); ++m)
    place[static_cast<size_t>(members[m])] = static_cast<int>(m);
  sets_[set] = {std::move(members), std::move(place), false};
}

void Coordinator::drop_set(uint32_t set) {
  if (set >= sets_.size()) return;
  sets_[set].dropped = true;
  ++round_;
  std::erase_if(complete_, [&](const Slot* slot) { return slot->agreed.set == set; });
  std::erase_if(slots_, [&](const auto& entry) {
    Slot& slot = *entry.second;
    if (slot.agreed.set != set) return false;
    forget_count(slot);
    if (slot.id == kNoId) return true;
    tell_forgotten(slot);
    by_id_[slot.id] = nullptr;
    free_ids_.push_back(slot.id);
    uses_.erase(slot.use);
    return true;
  });
  for (size_t r = 0; r < mail_.size(); ++r) close_message(static_cast<int>(r), true);
}

// ---- what ranks say ----

void Coordinator::receive(int rank, std::span<const std::byte> message, TimePoint when) {
  WireReader from(message);
  const auto seen = from.get<uint64_t>();
  while (!from.done()) {
    switch (from.get_enum(Offered::join)) {
      case Offered::bits: {
        const auto first = from.get<uint32_t>();
        const auto bits = from.get_list<uint64_t>(kMostIds / 64);
        for (size_t w = 0; w < bits.size(); ++w)
          for (uint64_t word = bits[w]; word != 0; word &= word - 1)
            take_ready(rank,
                       first + static_cast<uint32_t>(w * 64) +
                           static_cast<uint32_t>(std::countr_zero(word)),
                       seen, when);
        break;
      }
      case Offered::list:
        for (const uint32_t id : from.get_list<uint32_t>(kMostIds))
          take_ready(rank, id, seen, when);
        break;
      case Offered::full: {
        const auto number = from.get<uint32_t>();
        take_full(rank, number, decode_signature(from), when);
        break;
      }
      case Offered::join:
        take_join(rank, from.get<int64_t>());
        break;
    }
  }
}

Coordinator::Set& Coordinator::set_of(uint32_t set, int rank) {
  if (set >= sets_.size() || sets_[set].place.empty() ||
      sets_[set].place[static_cast<size_t>(rank)] < 0)
    WireReader::malformed("rank " + std::to_string(rank) + " is no member of set " +
                          std::to_string(set));
  return sets_[set];
}

void Coordinator::take_ready(int rank, uint32_t id, uint64_t seen, TimePoint when) {
  if (id >= by_id_.size()) WireReader::malformed("id " + std::to_string(id) + " is unknown");
  Slot* slot = by_id_[id];
  if (slot == nullptr || seen < id_since_[id]) {  // it comes again, in full
    ++stale_;
    return;
  }
  const Set& set = set_of(slot->agreed.set, rank);
  Offer& offer = slot->offers[static_cast<size_t>(set.place[static_cast<size_t>(rank)])];
  if (offer.state != Offer::State::none) WireReader::malformed("an id is offered twice");
  offer.state = Offer::State::ready;
  count(*slot, when);
}

void Coordinator::take_full(int rank, uint32_t number, Signature signature, TimePoint when) {
  const Set& set = set_of(signature.set, rank);
  if (set.dropped) return;
  for (const TensorSignature& tensor : signature.tensors)
    if (tensor.shape.empty() && extents_count(signature, 1) > 0)
      WireReader::malformed("a tensor without rows");
  if (extents_of(signature).size() != extents_count(signature, set.members.size()))
    WireReader::malformed("splits of another number of members");
  Slot& slot = slot_of(signature);
  Offer& offer = slot.offers[static_cast<size_t>(set.place[static_cast<size_t>(rank)])];
  if (offer.state != Offer::State::none) WireReader::malformed("a name is offered twice");
  offer.state = Offer::State::full;
  offer.number = number;
  offer.signature = std::make_unique<Signature>(std::move(signature));
  count(slot, when);
}

Coordinator::Slot& Coordinator::slot_of(const Signature& signature) {
  std::unique_ptr<Slot>& slot = slots_[signature.key()];
  if (!slot) {
    slot = std::make_unique<Slot>();
    slot->agreed = signature;
    slot->offers.resize(sets_[signature.set].members.size());
  }
  return *slot;
}

void Coordinator::count(Slot& slot, TimePoint when) {
  if (slot.offered++ == 0) {
    slot.since = when;
    slot.arrival = arrivals_++;
    const bool barrier = slot.agreed.kind == Collective::barrier;
    slot.counted = barrier ? &barriers_ : note_of(slot).empty() ? nullptr : &parts_;
    if (slot.counted != nullptr) ++*slot.counted;
  }
  if (!slot.complete && is_complete(slot)) {
    slot.complete = true;
    complete_.push_back(&slot);
  } else if (slot.counted != nullptr && parts_ > 0 && barriers_ > 0) {
    end_abandoned(slot);
  }
}

void Coordinator::forget_count(Slot& slot) {
  if (slot.counted != nullptr) --*std::exchange(slot.counted, nullptr);
}

/// All members have offered it, or have joined.
bool Coordinator::is_complete(const Slot& slot) const {
  if (slot.offered == slot.offers.size()) return true;
  if (joined_count_ == 0) return false;
  return std::ranges::none_of(sets_[slot.agreed.set].members,
                              [&](int r) { return is_missing(slot, r); });
}

void Coordinator::take_join(int rank, int64_t when) {
  if (joined_[static_cast<size_t>(rank)]) WireReader::malformed("a rank joins twice");
  joined_[static_cast<size_t>(rank)] = true;
  if (joined_count_ == 0 || when >= last_join_at_) {
    last_joined_ = rank;
    last_join_at_ = when;
  }
  ++joined_count_;
  for (auto& [key, slot] : slots_)
    if (slot->offered > 0 && !slot->complete && is_complete(*slot)) {
      slot->complete = true;
      complete_.push_back(slot.get());
    }
}

// ---- calls that were left ----

/// `slot`, which has just been offered and waits, may be a part of a call that some rank has left,
/// or the barrier by which that rank begins the next one.
void Coordinator::end_abandoned(Slot& slot) {
  if (slot.counted == &parts_) {
    Signature opener;
    opener.kind = Collective::barrier;
    opener.set = slot.agreed.set;
    opener.name = note_of(slot);
    const auto found = slots_.find(opener.key());
    if (found != slots_.end() && found->second->offered > 0) end_abandoned({&slot}, *found->second);
    return;
  }
  std::vector<Slot*> parts;
  for (const auto& [key, part] : slots_)
    if (part->counted == &parts_ && !part->complete && part->agreed.set == slot.agreed.set &&
        note_of(*part) == slot.agreed.name)
      parts.push_back(part.get());
  if (!parts.empty()) end_abandoned(std::move(parts), slot);
}

void Coordinator::end_abandoned(std::vector<Slot*> parts, const Slot& opener) {
  constexpr size_t kMostNamed = 8;
  std::ranges::sort(parts, {}, &Slot::arrival);
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
  for (Slot* part : parts) {
    refuse(*part, set, error);
    reset(*part);
  }
  for (const int member : set.members) close_message(member, true);
}

// ---- the same name for different things ----

bool Coordinator::has_offered(const Slot& slot, int rank) const {
  const int place = sets_[slot.agreed.set].place[static_cast<size_t>(rank)];
  return place >= 0 && slot.offers[static_cast<size_t>(place)].state != Offer::State::none;
}

std::vector<int> Coordinator::present_of(const Slot& slot) const {
  std::vector<int> present;
  std::ranges::copy_if(sets_[slot.agreed.set].members, std::back_inserter(present),
                       [&](int r) { return has_offered(slot, r); });
  return present;
}

bool Coordinator::is_missing(const Slot& slot, int rank) const {
  const int place = sets_[slot.agreed.set].place[static_cast<size_t>(rank)];
  return place >= 0 && !joined_[static_cast<size_t>(rank)] && !has_offered(slot, rank);
}

/// Each waits for a rank that has submitted the other one instead.
bool Coordinator::are_crossed(const Slot& a, const Slot& b) const {
  bool instead_of_a = false, instead_of_b = false;
  for (int r = 0; r < static_cast<int>(joined_.size()); ++r) {
    instead_of_a |= is_missing(a, r) && has_offered(b, r);
    instead_of_b |= is_missing(b, r) && has_offered(a, r);
  }
  return instead_of_a && instead_of_b;
}

void Coordinator::refuse_crossed(TimePoint before) {
  std::map<std::string, std::vector<Slot*>> by_name;
  for (const auto& [key, slot] : slots_)
    if (slot->offered > 0 && !slot->complete && slot->since <= before)
      by_name[slot->agreed.name].push_back(slot.get());
  for (auto& [name, slots] : by_name) {
    std::ranges::sort(slots, {}, [&](const Slot* slot) { return present_of(*slot).front(); });
    for (size_t i = 1; i < slots.size(); ++i)
      if (are_crossed(*slots[i - 1], *slots[i])) {
        refuse_both(*slots[i - 1], *slots[i]);
        break;  // both are gone
      }
  }
}

void Coordinator::refuse_both(Slot& a, Slot& b) {
  const bool of_sets = a.agreed.kind == b.agreed.kind;
  Context where;
  where.operation = name_of(a.agreed.kind);
  where.tensor = a.agreed.name;
  for (const Slot* slot : {&a, &b}) {
    const std::vector<int>& members = sets_[slot->agreed.set].members;
    where.values.emplace_back(
        of_sets ? "ranks " + describe_ranks(members) : std::string(name_of(slot->agreed.kind)),
        present_of(*slot));
  }
  const std::string what =
      of_sets ? "process set of " + a.agreed.title() : "operation of '" + a.agreed.name + "'";
  const Error error(ErrorCode::mismatch,
                    "ranks disagree on the " + what + ": " + describe_values(where.values), where,
                    "call the same by that name on every rank");
  for (Slot* slot : {&a, &b}) {
    refuse(*slot, sets_[slot->agreed.set], error);
    reset(*slot);
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
  for (const auto& [key, slot] : slots_) {
    if (slot->offered == 0) continue;
    Waiting one{&slot->agreed, slot->since, {}, {}, slot->arrival};
    const std::vector<int>& members = sets_[slot->agreed.set].members;
    for (size_t m = 0; m < members.size(); ++m)
      (slot->offers[m].state == Offer::State::none ? one.missing : one.present)
          .push_back(members[m]);
    all.push_back(std::move(one));
  }
  std::ranges::sort(all, {}, &Waiting::arrival);
  return all;
}

void Coordinator::tell_late(const Waiting& what) {
  const auto found = slots_.find(what.signature->key());
  if (found == slots_.end()) return;
  const Slot& slot = *found->second;
  const std::vector<int>& members = sets_[slot.agreed.set].members;
  for (size_t m = 0; m < members.size(); ++m) {
    if (slot.offers[m].state == Offer::State::none) continue;
    WireWriter& to = record(members[m], Ordered::late);
    put_reference(to, slot, slot.offers[m]);
    to.put_list(std::span<const int>(what.missing));
    close_message(members[m], true);
  }
}

}  // namespace farandole
