// The order: what is complete, and what everybody is told about it.
#include <algorithm>
#include <iterator>

#include "control/failure_detector.h"
#include "named/negotiation_messages.h"
#include "named/negotiator.h"

namespace farandole {

// ---- a round ----

void Coordinator::order() {
  const bool all_joined = joined_count_ == joined_.size();
  if (complete_.empty() && !all_joined) return;
  ++round_;
  // Ids follow each other: a step's names are a few runs of them. New names as they came.
  std::ranges::sort(complete_, {}, [](const Tally* tally) {
    return tally->id != kNoId ? uint64_t{tally->id} : uint64_t{kNoId} + tally->arrival;
  });
  for (Tally* tally : complete_) settle(*tally);
  complete_.clear();
  if (all_joined) {
    for (size_t r = 0; r < mail_.size(); ++r)
      put_as<OrderedJoined>(record(static_cast<int>(r), OrderedJoined::kTag), last_joined_);
    joined_.assign(joined_.size(), false);
    joined_count_ = 0;
  }
  for (size_t r = 0; r < mail_.size(); ++r) close_message(static_cast<int>(r), true);
}

void Coordinator::settle(Tally& tally) {
  const Set& set = sets_[tally.agreed.set];
  bool as_agreed = true, absent = false;
  std::vector<const Signature*> by_member;
  for (size_t m = 0; m < tally.offers.size(); ++m) {
    const Offer& offer = tally.offers[m];
    as_agreed &= offer.state == Offer::State::ready;
    absent |= offer.state == Offer::State::none;
    if (as_agreed) continue;
    if (by_member.empty()) by_member.assign(m, &tally.agreed);
    by_member.push_back(offer.state == Offer::State::ready  ? &tally.agreed
                        : offer.state == Offer::State::full ? offer.signature.get()
                                                            : nullptr);
  }
  if (as_agreed) {
    for (const int member : set.members) put_run(member, tally.id);
  } else if (const auto error = disagreement(by_member, set.members)) {
    refuse(tally, set, *error);
  } else {
    agree(tally, set, by_member, absent);
  }
  reset(tally);
}

/// The operation runs on a signature that some member has not received yet.
void Coordinator::agree(Tally& tally, const Set& set, std::span<const Signature* const> by_member,
                        bool absent) {
  const Signature& signature =
      **std::ranges::find_if(by_member, [](const Signature* t) { return t; });
  const size_t each = extents_count(signature, set.members.size());
  std::vector<int64_t> extents;
  bool lasting = true;
  for (size_t m = 0; m < by_member.size(); ++m) {
    const auto begin = static_cast<std::ptrdiff_t>(m * each);
    if (by_member[m] == nullptr)
      extents.resize(extents.size() + each);  // a member that has joined has nothing
    else if (tally.offers[m].state == Offer::State::ready)
      extents.insert(extents.end(), tally.extents.begin() + begin,
                     tally.extents.begin() + begin + static_cast<std::ptrdiff_t>(each));
    else
      std::ranges::copy(extents_of(*by_member[m]), std::back_inserter(extents));
    lasting &= by_member[m] != nullptr && by_member[m]->lasting;
  }
  if (absent && signature.kind == Collective::broadcast)
    for (size_t m = 0; m < by_member.size(); ++m)
      if (set.members[m] == signature.root && by_member[m] == nullptr) {
        Context where;
        where.rank = signature.root;
        where.operation = name_of(signature.kind);
        where.tensor = signature.name;
        return refuse(
            tally, set,
            Error(ErrorCode::mismatch,
                  "the root of " + signature.title() + ", rank " + std::to_string(signature.root) +
                      ", has joined and has nothing to send",
                  std::move(where), "broadcast before join(), or from another rank"));
      }
  if (!absent && lasting) {
    if (tally.id == kNoId) claim_id(tally);
    if (tally.id != kNoId) {
      if (&signature != &tally.agreed) tally.agreed = signature;
      tally.extents = extents;
    }
  }
  const uint32_t kept = !absent && lasting ? tally.id : kNoId;
  for (size_t m = 0; m < by_member.size(); ++m) {
    const int member = set.members[m];
    if (by_member[m] == nullptr)
      put_as<OrderedByProxy>(record(member, OrderedByProxy::kTag), signature, extents);
    else
      put_as<OrderedAgreed>(record(member, OrderedAgreed::kTag),
                            reference_to(tally, tally.offers[m]), kept, extents);
  }
}

void Coordinator::refuse(Tally& tally, const Set& set, const Error& error) {
  const ErrorRecord record_of_error = encode(error);
  for (size_t m = 0; m < tally.offers.size(); ++m) {
    if (tally.offers[m].state == Offer::State::none) continue;
    put_as<OrderedRefused>(record(set.members[m], OrderedRefused::kTag),
                           reference_to(tally, tally.offers[m]), record_of_error);
  }
}

/// It has been decided; a name without an id is not remembered.
void Coordinator::reset(Tally& tally) {
  forget_count(tally);
  if (tally.id == kNoId) {
    tallies_.erase(tally.agreed.key());
    return;
  }
  for (Offer& offer : tally.offers) {
    offer.state = Offer::State::none;
    offer.signature.reset();
  }
  tally.offered = 0;
  tally.complete = false;
  uses_.splice(uses_.end(), uses_, tally.use);
}

/// A free id, else that of the name longest unused; none while all of them are under way.
void Coordinator::claim_id(Tally& tally) {
  uint32_t id = kNoId;
  if (!free_ids_.empty()) {
    id = free_ids_.back();
    free_ids_.pop_back();
  } else if (by_id_.size() < capacity_) {
    id = static_cast<uint32_t>(by_id_.size());
    by_id_.push_back(nullptr);
    id_since_.push_back(0);
  } else {
    const auto idle = std::ranges::find_if(uses_, [](const Tally* s) { return s->offered == 0; });
    if (idle == uses_.end()) return;
    Tally& evicted = **idle;
    id = evicted.id;
    tell_forgotten(evicted);
    uses_.erase(idle);
    tallies_.erase(evicted.agreed.key());
  }
  tally.id = id;
  by_id_[id] = &tally;
  id_since_[id] = round_;
  tally.use = uses_.insert(uses_.end(), &tally);
}

// ---- messages ----

void Coordinator::put_run(int rank, uint32_t id) {
  auto& runs = mail_[static_cast<size_t>(rank)].runs;
  if (!runs.empty() && runs[runs.size() - 2] + runs.back() == id)
    ++runs.back();
  else
    runs.insert(runs.end(), {id, 1});
}

void Coordinator::begin_message(Mailbox& mail) {
  if (mail.body.size() > 0) return;
  put_as<OrderedHead>(mail.body, round_, false);  // whether it is the last: see close_message
}

void Coordinator::put_runs(Mailbox& mail) {
  if (mail.runs.empty()) return;
  begin_message(mail);
  put_tagged<OrderedRuns>(mail.body, mail.runs);
  mail.runs.clear();
}

/// Begins a record behind what was said before.
WireWriter& Coordinator::record(int rank, Ordered tag) {
  Mailbox& mail = mail_[static_cast<size_t>(rank)];
  if (mail.body.size() >= kFullMessage) close_message(rank, false);
  put_runs(mail);
  begin_message(mail);
  mail.body.put(tag);
  return mail.body;
}

void Coordinator::tell_forgotten(const Tally& tally) {
  for (const int member : sets_[tally.agreed.set].members)
    put_as<OrderedForget>(record(member, OrderedForget::kTag), tally.id);
}

Reference Coordinator::reference_to(const Tally& tally, const Offer& offer) {
  const bool by_id = offer.state == Offer::State::ready;
  return {by_id, by_id ? tally.id : offer.number};
}

/// Hands the body over for sending.
void Coordinator::close_message(int rank, bool last) {
  Mailbox& mail = mail_[static_cast<size_t>(rank)];
  if (last) put_runs(mail);
  if (last && mail.unfinished) begin_message(mail);
  if (mail.body.size() == 0) return;
  std::vector<std::byte> message = mail.body.take();
  message[sizeof round_] = std::byte{last};
  mail.unfinished = !last;
  mail.messages.push_back(std::move(message));
}

bool Coordinator::take_message(int rank, std::vector<std::byte>& message) {
  auto& messages = mail_[static_cast<size_t>(rank)].messages;
  if (messages.empty()) return false;
  message = std::move(messages.front());
  messages.pop_front();
  return true;
}

}  // namespace farandole
