#include <algorithm>
#include <utility>

#include "control/failure_detector.h"
#include "named/negotiation_messages.h"
#include "named/negotiator.h"

namespace farandole {

void Participant::submit(Name& name) {
  name.state = Name::State::queued;
  if (name.agreed && name.id != kNoId)
    ready_.push_back(name.id);
  else
    queued_.push_back(&name);
}

// ---- what this rank says ----

bool Participant::take_message(std::vector<std::byte>& message) {
  if (ready_.empty() && queued_.empty() && !joins_) return false;
  WireWriter to;
  put_as<OfferedHead>(to, seen_);
  if (!ready_.empty()) put_ready(to);
  // Joins last: what was submitted before it is not meant to be stood in for.
  if (put_offers(to) && joins_) {
    put_tagged<OfferedJoin>(to, int64_t{joins_->time_since_epoch().count()});
    joins_.reset();
  }
  message = to.take();
  return true;
}

/// As bits over the range of the ids, or as a list where that is shorter.
void Participant::put_ready(WireWriter& to) {
  const auto [least, most] = std::ranges::minmax(ready_);
  const size_t words = (most - least) / 64 + 1;
  for (const uint32_t id : ready_)
    if (by_id_[id] != nullptr) by_id_[id]->state = Name::State::offered;
  if (words * sizeof(uint64_t) <= ready_.size() * sizeof(uint32_t)) {
    std::vector<uint64_t> bits(words);
    for (const uint32_t id : ready_) bits[(id - least) / 64] |= uint64_t{1} << (id - least) % 64;
    put_tagged<OfferedBits>(to, least, bits);
  } else {
    put_tagged<OfferedList>(to, ready_);
  }
  ready_.clear();
}

/// True when all of them are in the message.
bool Participant::put_offers(WireWriter& to) {
  size_t taken = 0;
  for (; taken < queued_.size() && to.size() < kFullMessage; ++taken) {
    Name& name = *queued_[taken];
    name.state = Name::State::offered;
    name.number = next_number_++;
    by_number_[name.number] = &name;
    put_tagged<OfferedFull>(to, name.number, name.signature);
  }
  queued_.erase(queued_.begin(), queued_.begin() + static_cast<std::ptrdiff_t>(taken));
  return queued_.empty();
}

// ---- what it is told ----

/// A round counts as a whole: an offer made between its parts would look stale.
void Participant::receive(std::span<const std::byte> message, std::vector<Decision>& decisions) {
  WireReader header(message);
  const auto head = get_message<OrderedHead>(header);
  const auto records = message.subspan(kOrderedHeadBytes);
  parts_.insert(parts_.end(), records.begin(), records.end());
  if (!head.last) return;
  const std::vector<std::byte> whole = std::exchange(parts_, {});
  WireReader from(whole);
  while (!from.done()) decide(from.get_enum(Ordered::joined), from, decisions);
  seen_ = head.round;
  decisions.push_back({.what = Decision::What::round_end});
}

void Participant::decide(Ordered tag, WireReader& from, std::vector<Decision>& decisions) {
  if (tag == Ordered::runs) return decide_runs(from, decisions);
  if (tag == Ordered::agreed) return decide_agreed(from, decisions);
  if (tag == Ordered::forget) return forget(from, decisions);
  Decision decision{.what = Decision::What::by_proxy};
  decision.more = std::make_unique<Decision::More>();
  Decision::More& more = *decision.more;
  if (tag == Ordered::by_proxy) {
    auto ordered = get_message<OrderedByProxy>(from);
    more.signature = std::move(ordered.signature);
    more.extents = std::move(ordered.extents);
    more.once = true;
  } else if (tag == Ordered::refused) {
    decision.what = Decision::What::refuse;
    const auto ordered = get_message<OrderedRefused>(from);
    decision.name = decided(ordered.reference);  // an id means what it meant
    more.error.push_back(farandole::decode(ordered.error));
  } else if (tag == Ordered::late) {
    decision.what = Decision::What::late;
    auto ordered = get_message<OrderedLate>(from);
    decision.name = look_for(ordered.reference);
    more.ranks = std::move(ordered.ranks);
    if (decision.name == nullptr) return;  // it has been decided since
  } else {
    decision.what = Decision::What::joined;
    more.last = get_message<OrderedJoined>(from).last;
  }
  decisions.push_back(std::move(decision));
}

/// The name that a reference means; null when nothing was offered so.
Name* Participant::look_for(const Reference& reference) {
  const uint32_t which = reference.which;
  if (reference.by_id) return which < by_id_.size() ? by_id_[which] : nullptr;
  const auto found = by_number_.find(which);
  return found == by_number_.end() ? nullptr : found->second;
}

/// The same, which is no offer any more: an offer is decided once.
Name* Participant::decided(const Reference& reference) {
  Name* name = look_for(reference);
  if (name == nullptr || name->state != Name::State::offered)
    WireReader::malformed("an order of what was not offered");
  if (!reference.by_id) by_number_.erase(reference.which);
  name->state = Name::State::resting;
  return name;
}

void Participant::decide_runs(WireReader& from, std::vector<Decision>& decisions) {
  const std::vector<uint32_t> runs = get_message<OrderedRuns>(from).runs;
  for (size_t i = 0; i + 1 < runs.size(); i += 2)
    for (uint32_t id = runs[i]; id - runs[i] < runs[i + 1]; ++id) {
      Name* const name = decided({.by_id = true, .which = id});
      if (!name->agreed) WireReader::malformed("id " + std::to_string(id) + ", offered in full");
      decisions.push_back({.what = Decision::What::run, .name = name});
    }
}

void Participant::decide_agreed(WireReader& from, std::vector<Decision>& decisions) {
  auto ordered = get_message<OrderedAgreed>(from);
  Name* name = decided(ordered.reference);
  const uint32_t id = ordered.id;
  Decision decision{.what = Decision::What::run, .name = name};
  decision.more = std::make_unique<Decision::More>();
  decision.more->extents = std::move(ordered.extents);
  decision.more->once = id == kNoId;
  if (id != kNoId) {
    if (id > kMostIds) WireReader::malformed("id " + std::to_string(id));
    if (id >= by_id_.size()) by_id_.resize(id + 1, nullptr);
    if (by_id_[id] != nullptr && by_id_[id] != name)
      WireReader::malformed("id " + std::to_string(id) + ", which another name has");
    by_id_[id] = name;
    name->id = id;
    name->agreed = true;
    name->extents = decision.more->extents;
  }
  decisions.push_back(std::move(decision));
}

void Participant::forget(WireReader& from, std::vector<Decision>& decisions) {
  const uint32_t id = get_message<OrderedForget>(from).id;
  if (id >= by_id_.size() || by_id_[id] == nullptr) return;
  Name* name = std::exchange(by_id_[id], nullptr);
  const bool by_its_id = name->agreed;  // as it was or would be offered
  name->id = kNoId;
  name->agreed = false;
  if (name->state == Name::State::resting) {
    decisions.push_back({.what = Decision::What::forget, .name = name});
  } else if (by_its_id) {
    // Offered by an id that means nothing any more, or about to be: again, in full.
    std::erase(ready_, id);
    submit(*name);
  }
}

}  // namespace farandole
