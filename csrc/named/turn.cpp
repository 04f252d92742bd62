// The polling thread's work for operations by name: messages, the order, its decisions.
#include <algorithm>
#include <utility>

#include "named/named.h"

namespace farandole {

// ---- a turn of the thread that polls ----

bool Named::poll(TimePoint) {
  const bool has_work = inbox_full_.load(std::memory_order_acquire) ||
                        unfinished_.load(std::memory_order_relaxed) > 0 || holds_unsent_;
  if (!has_work && !coordinator_) return false;
  bool moved = take_inbox();
  try {
    moved |= pass_messages();
  } catch (const Error& error) {
    give_up(error);
  } catch (const std::exception& error) {
    give_up(Error(ErrorCode::internal, std::string("in the order of names: ") + error.what()));
  }
  moved |= fail_failed();
  moved |= launches_.poll(finished_);
  if (!finished_.empty()) finish(finished_);
  return moved;
}

/// A decision cannot be understood, or carried out: the world fails. What was ordered with it waits
/// as before, for the end of its set.
void Named::give_up(const Error& error) {
  decisions_.clear();
  for (NamedRequest* const request : launches_.drop_round()) {
    request->ordered = false;
    ++polled_sets_[request->name->signature.set]->unordered;
  }
  polled_sets_[0]->set.membership.detector->report(error);
}

bool Named::take_inbox() {
  if (!inbox_full_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(mutex_);
  inbox_full_.store(false, std::memory_order_relaxed);
  for (auto& state : new_sets_) {
    if (coordinator_) {
      coordinator_->add_set(state->set.number, state->set.members);
      // Others may submit in a set while this rank does nothing at all.
      if (state->set.rank < 0) hold_for(holds_listening_, true);
    }
    polled_sets_.push_back(std::move(state));
  }
  new_sets_.clear();
  for (const uint32_t set : removed_sets_) {
    if (coordinator_) coordinator_->drop_set(set);
    if (launches_.idle()) polled_sets_[set]->set.stream.reset();
  }
  removed_sets_.clear();
  begun_ += inbox_.size();
  for (NamedRequest* request : inbox_) {
    if (request->name == nullptr) {
      joins_.push_back(request);
      ++polled_sets_[0]->unordered;
      participant_.join(request->joined_at);
      continue;
    }
    ++polled_sets_[request->name->signature.set]->unordered;
    request->submitted = true;
    participant_.submit(*request->name);
  }
  inbox_.clear();
  return true;
}

/// A rank that has left is driven for its own end alone.
void Named::hold_for(bool& held, bool needed) {
  needed &= !engine_.has_left();
  if (held == needed) return;
  held = needed;
  if (needed)
    engine_.hold_on();
  else
    engine_.let_go();
}

// ---- messages ----

bool Named::pass_messages() {
  const bool moved = coordinator_ ? pass_messages_as_coordinator() : pass_messages_as_member();
  if (!decisions_.empty()) {
    taken("an order of names", 0, rank_, [&] { apply(decisions_); });
    decisions_.clear();
  }
  return moved;
}

bool Named::pass_messages_as_coordinator() {
  bool moved = false;
  std::vector<std::byte> message;
  while (participant_.take_message(message)) {
    coordinator_->receive(0, message, now());
    moved = true;
  }
  for (size_t r = 1; r < links_.size(); ++r) {
    moved |= poll_link(static_cast<int>(r));
    for (; links_[r]->receive(message); moved = true)  // also what came while it was sending
      taken("an offer of names", static_cast<int>(r), rank_,
            [&] { coordinator_->receive(static_cast<int>(r), message, now()); });
  }
  if (moved) coordinator_->order();
  if (coordinator_->take_message(0, message)) {
    const std::lock_guard lock(mutex_);  // names at rest may be forgotten
    do participant_.receive(message, decisions_);
    while (coordinator_->take_message(0, message));
  }
  bool unsent = false;
  for (size_t r = 1; r < links_.size(); ++r) {
    while (coordinator_->take_message(static_cast<int>(r), message))
      links_[r]->send(std::move(message));
    if (links_[r]->sent()) continue;
    moved |= poll_link(static_cast<int>(r));
    unsent |= !links_[r]->sent();
  }
  unsent_.store(unsent, std::memory_order_release);
  hold_for(holds_unsent_, unsent);  // others wait for it, whether or not this rank does
  return moved;
}

bool Named::poll_link(int rank) {
  return taken("the length of a message", rank, rank_,
               [&] { return links_[static_cast<size_t>(rank)]->poll(); });
}

bool Named::pass_messages_as_member() {
  MessageLink& link = *links_[0];
  std::vector<std::byte> message;
  while (participant_.take_message(message)) link.send(std::move(message));
  const bool moved = poll_link(0);
  if (link.receive(message)) {
    const std::lock_guard lock(mutex_);  // names at rest may be forgotten
    do taken("an order of names", 0, rank_, [&] { participant_.receive(message, decisions_); });
    while (link.receive(message));
  }
  return moved;
}

// ---- what was decided ----

void Named::apply(std::vector<Decision>& decisions) {
  for (Decision& d : decisions) {
    auto* entry = d.name != nullptr ? static_cast<Entry*>(d.name->owner) : nullptr;
    switch (d.what) {
      case Decision::What::run:
      case Decision::What::by_proxy:
        apply_order(d);
        break;
      case Decision::What::refuse:
        if (entry->request == nullptr) break;  // its set has failed meanwhile
        entry->request->error = std::move(d.more->error.front());
        entry->request->ordered = true;
        --polled_sets_[d.name->signature.set]->unordered;
        finished_.push_back(entry->request);
        break;
      case Decision::What::late:
        if (entry->request == nullptr) break;
        for (const int r : d.more->ranks) check_rank(r);
        entry->request->missing = std::move(d.more->ranks);
        entry->request->told = true;
        next_check_ = TimePoint{};
        break;
      case Decision::What::forget: {
        const std::lock_guard lock(mutex_);
        if (entry->request != nullptr) break;
        const Signature& signature = d.name->signature;
        polled_sets_[signature.set]->entries[static_cast<size_t>(signature.kind)].erase(
            std::string(signature.name));
        break;
      }
      case Decision::What::joined:
        if (joins_.empty()) break;
        check_rank(d.more->last);
        joins_.front()->last_joined = d.more->last;
        --polled_sets_[0]->unordered;
        finished_.push_back(joins_.front());
        joins_.pop_front();
        break;
      case Decision::What::round_end:
        launches_.end_round();
        break;
    }
  }
}

void Named::check_rank(int rank) const {
  if (rank < 0 || rank >= static_cast<int>(engine_.host().peers.size()))
    WireReader::malformed("rank " + std::to_string(rank));
}

/// An operation that cannot be launched here fails its set: the others wait for this rank. It ends
/// as operations that wait for their order do.
void Named::apply_order(Decision& d) {
  const Signature& signature =
      d.what == Decision::What::by_proxy ? d.more->signature : d.name->signature;
  if (signature.set >= polled_sets_.size() || polled_sets_[signature.set]->set.rank < 0)
    WireReader::malformed("an operation in set " + std::to_string(signature.set));
  SetState& state = *polled_sets_[signature.set];
  try {
    launch(d, state);
  } catch (const Malformed&) {
    throw;
  } catch (const Error& error) {
    state.set.membership.detector->report(error);
  } catch (const std::exception& error) {
    state.set.membership.detector->report(
        Error(ErrorCode::resource, "rank " + std::to_string(rank_) + " cannot begin " +
                                       signature.title() + ": " + error.what()));
  }
}

void Named::launch(Decision& d, SetState& state) {
  const NamedSet& set = state.set;
  if (d.what == Decision::What::by_proxy) {
    check_signature(d.more->signature, set.members);
    check_extents(d.more->signature, set.members.size(), d.more->extents, set.rank, {});
    auto request = std::make_unique<NamedRequest>();
    request->signature = std::make_unique<Signature>(std::move(d.more->signature));
    launches_.add_proxy(std::move(request), set, d.more->extents);
    return;
  }
  NamedRequest* request = static_cast<Entry*>(d.name->owner)->request;
  if (request == nullptr) return;  // its set has failed meanwhile
  const Signature& mine = d.name->signature;
  if (d.more) check_extents(mine, set.members.size(), d.more->extents, set.rank, extents_of(mine));
  launches_.add(*request, set, d.more && d.more->once ? d.more->extents : d.name->extents);
  request->ordered = true;
  --state.unordered;
}

void Named::finish(std::vector<NamedRequest*>& requests) {
  const auto count = static_cast<int>(requests.size());
  {
    const std::lock_guard lock(mutex_);
    for (NamedRequest* request : requests) {
      if (request->name != nullptr) {
        part_from_name(*request);
        continue;
      }
      joining_ = false;
      // While a rank had joined it did not count the others' submissions: all begin anew.
      for (const auto& state : sets_) state->nameless.fill(0);
    }
  }
  std::vector<NamedRequest*> untold;
  for (NamedRequest* request : requests) {
    if (request->completion) complete(*request);
    if (request->waits)
      request->finished.store(true, std::memory_order_release);  // partner: done
    else
      untold.push_back(request);
  }
  requests.clear();
  if (!untold.empty()) tell(std::move(untold));
  if (unfinished_.fetch_sub(count) == count) engine_.let_go();
  engine_.note_finished();
}

/// Called before the waiting thread may release the request.
void Named::complete(NamedRequest& request) {
  engine_.complete([completion = std::exchange(request.completion, nullptr),
                    error = request.error] { completion(error ? &*error : nullptr); });
}

/// Notifies listeners once the token is free.
void Named::tell(std::vector<NamedRequest*> requests) {
  engine_.driver().count_unattended(-static_cast<int>(requests.size()));
  engine_.complete([requests = std::move(requests)] {
    for (NamedRequest* request : requests)
      std::exchange(request->listener, nullptr)->finished(*request);
  });
}

/// From here on the name may be forgotten, whether or not its result was taken. One that does not
/// last is gone at once; where no order came, the participant still knows it.
void Named::part_from_name(NamedRequest& request) {
  const Name& name = *std::exchange(request.name, nullptr);
  static_cast<Entry*>(name.owner)->request = nullptr;
  if (name.state != Name::State::resting || name.signature.lasting) return;
  auto& entries =
      polled_sets_[name.signature.set]->entries[static_cast<size_t>(name.signature.kind)];
  entries.erase(entries.find(name.signature.name));
}

// ---- failure ----

/// Requests of failed groups that wait for their order; ordered ones end as their operations do.
bool Named::fail_failed() {
  bool moved = false;
  // Without the world there is nobody to order: its end is that of all sets.
  const FailureDetector& world = *polled_sets_[0]->set.membership.detector;
  if (world.failed())
    if (const auto verdict = world.verdict())
      for (const auto& state : polled_sets_) {
        const auto& detector = state->set.membership.detector;
        if (detector && !detector->failed()) detector->report(*verdict);
      }
  for (const auto& state : polled_sets_) {
    if (state->unordered == 0 || !state->set.membership.detector->failed()) continue;
    const auto verdict = state->set.membership.detector->verdict();
    if (!verdict) continue;  // it is being written
    fail_unordered(*state, *verdict);
    moved = true;
  }
  return moved;
}

void Named::fail_unordered(SetState& state, const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    for (const Entries& entries : state.entries)
      for (const auto& [key, entry] : entries) {
        NamedRequest* request = entry->request;
        // Those still in the inbox are not counted yet, and come to their end in the next turn.
        if (request == nullptr || request->ordered || !request->submitted) continue;
        request->error = error;
        finished_.push_back(request);
        --state.unordered;
      }
  }
  if (state.set.number != 0) return;
  for (NamedRequest* request : joins_) {
    request->error = error;
    finished_.push_back(request);
    --state.unordered;
  }
  joins_.clear();
}

}  // namespace farandole
