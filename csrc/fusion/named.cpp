#include "fusion/named.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr uint64_t kChannelsNumber = (uint64_t{1} << 62) + 1;  // the stream has the one before

// Packing costs two copies, an operation by itself a few microseconds and no copy.
constexpr size_t kAlone = 128 << 10;

Error invalid(const std::string& text) { return Error(ErrorCode::invalid_argument, text); }

}  // namespace

std::shared_ptr<Named> Named::open(Group& world, NamedOptions options) {
  auto named = std::make_shared<Named>(world, options);
  world.engine()->add_task(named);
  return named;
}

Named::Named(Group& world, NamedOptions options)
    : engine_(*world.engine()),
      options_(options),
      rank_(world.rank()),
      timeout_(world.defaults().timeout),
      launches_(engine_, {options.fusion_bytes, kAlone}) {
  const Connect connect = engine_.options().channels(
      engine_, world.membership(), stream_key(world.membership().key, kChannelsNumber));
  links_.resize(static_cast<size_t>(world.size()));
  for (int r = 0; r < world.size(); ++r)
    if ((r == 0) != (rank_ == 0))
      links_[static_cast<size_t>(r)] = std::make_unique<MessageLink>(connect(r, 1));
  if (rank_ == 0) coordinator_ = std::make_unique<Coordinator>(world.size(), options.ids);
  add_set(&world, world.members());
}

// ---- sets ----

uint32_t Named::add_set(Group* group, std::vector<int> members) {
  auto state = std::make_shared<SetState>();
  NamedSet& set = state->set;
  set.members = std::move(members);
  if (group != nullptr) {
    set.place = group->rank();
    set.stream = group->stream_of_names();
    set.membership = group->membership();
    set.timeout = group->defaults().timeout;
    set.algorithm = group->defaults().algorithm;
    set.level = group->defaults().level;
  }
  const std::lock_guard lock(mutex_);
  set.number = static_cast<uint32_t>(sets_.size());
  sets_.push_back(state);
  new_sets_.push_back(state);
  inbox_full_.store(true, std::memory_order_release);
  return set.number;
}

void Named::remove_set(uint32_t set) {
  const std::lock_guard lock(mutex_);
  if (set == 0 || set >= sets_.size()) throw invalid("there is no such process set");
  sets_[set]->removed = true;
  removed_sets_.push_back(set);
  inbox_full_.store(true, std::memory_order_release);
}

Named::SetState& Named::set_for(uint32_t number) {
  if (number >= sets_.size() || sets_[number]->removed)
    throw invalid("process set " + std::to_string(number) + " is not registered");
  SetState& state = *sets_[number];
  if (!state.set.stream)
    throw invalid("rank " + std::to_string(rank_) + " is not in process set " +
                  std::to_string(number) + " of ranks " + describe_ranks(state.set.members));
  return state;
}

uint64_t Named::count_nameless(uint32_t set, Collective kind) {
  const std::lock_guard lock(mutex_);
  return set_for(set).nameless[static_cast<size_t>(kind)]++;
}

// ---- submissions ----

NamedRequest* Named::submit(const Ask& ask) {
  if (engine_.has_left())
    throw Error(ErrorCode::not_initialized, "this rank has left the world by shutdown()");
  NamedRequest* request = nullptr;
  {
    const std::lock_guard lock(mutex_);
    SetState& state = set_for(ask.set);
    if (state.set.membership.lifeline->failed())
      if (const auto verdict = state.set.membership.lifeline->verdict()) throw Error(*verdict);
    Entries& entries = state.entries[static_cast<size_t>(ask.kind)];
    auto found = entries.find(ask.name);
    if (found != entries.end() && found->second->request != nullptr) {
      Context where;
      where.operation = name_of(ask.kind);
      where.tensor = ask.name;
      throw Error(ErrorCode::invalid_argument,
                  std::string(name_of(ask.kind)) + " '" + std::string(ask.name) +
                      "' is in flight already on rank " + std::to_string(rank_),
                  std::move(where), "wait for it first, or give each tensor a name of its own");
    }
    if (found == entries.end() || !matches(found->second->name.terms, ask)) {
      check(ask, state.set);
      if (found == entries.end())
        found = entries.emplace(std::string(ask.name), std::make_unique<Entry>()).first;
      Name& name = found->second->name;
      name.terms = terms_of(ask);
      name.agreed = false;
      name.owner = found->second.get();
    }
    request = take_request();
    request->name = &found->second->name;
    request->parts.resize(ask.tensors.size());
    for (size_t i = 0; i < ask.tensors.size(); ++i) {
      request->parts[i].input = ask.tensors[i].input;
      request->parts[i].output = ask.tensors[i].output;
    }
    found->second->request = request;
    put_on_its_way(request);
  }
  engine_.wake();
  return request;
}

NamedRequest* Named::join() {
  if (engine_.has_left())
    throw Error(ErrorCode::not_initialized, "this rank has left the world by shutdown()");
  NamedRequest* request = nullptr;
  {
    const std::lock_guard lock(mutex_);
    set_for(0);
    if (joining_) throw invalid("rank " + std::to_string(rank_) + " has joined already");
    joining_ = true;
    request = take_request();
    put_on_its_way(request);
  }
  engine_.wake();
  return request;
}

/// A request as new. The lock is held.
NamedRequest* Named::take_request() {
  if (free_.empty()) return &requests_.emplace_back();
  NamedRequest* request = free_.back();
  free_.pop_back();
  request->finished.store(false, std::memory_order_relaxed);  // released by the lock
  request->error.reset();
  request->name = nullptr;
  request->parts.clear();
  request->received.clear();
  request->last_joined = -1;
  request->ordered = request->told = request->warned = false;
  request->since = TimePoint{};
  request->missing.clear();
  return request;
}

void Named::put_on_its_way(NamedRequest* request) {
  inbox_.push_back(request);
  inbox_full_.store(true, std::memory_order_seq_cst);  // partner: Engine::park
  if (unfinished_.fetch_add(1) == 0) engine_.hold_on();
}

bool Named::wait(NamedRequest& request, Deadline until) {
  if (done(request)) return true;
  return engine_.driver().wait(
      request.finished,
      request.name != nullptr ? std::string_view(request.name->terms.name) : "join", until);
}

void Named::release(NamedRequest* request) {
  const std::lock_guard lock(mutex_);
  for (NamedRequest::Part& part : request->parts) part.made = {};
  // A name that does not last is gone with its request, once nobody refers to it any more.
  if (request->name != nullptr && request->ordered && !request->name->terms.lasting) {
    const Terms& terms = request->name->terms;
    auto& entries = sets_[terms.set]->entries[static_cast<size_t>(*collective_named(terms.kind))];
    const auto entry = entries.find(terms.name);
    if (entry != entries.end() && entry->second->request == nullptr) entries.erase(entry);
  }
  request->name = nullptr;
  free_.push_back(request);
}

void Named::flush(Deadline until) {
  while (unsent_.load(std::memory_order_acquire) && !until.passed(now()))
    engine_.driver().turn(std::chrono::milliseconds(1));
}

std::string Named::describe() {
  constexpr size_t kMostShown = 20;
  const std::lock_guard lock(mutex_);
  std::string text;
  size_t more = 0, shown = 0;
  for (const auto& state : sets_)
    for (const Entries& entries : state->entries)
      for (const auto& [key, entry] : entries) {
        if (entry->request == nullptr) continue;
        if (++shown > kMostShown) {
          ++more;
          continue;
        }
        text += (text.empty() ? "by name: " : ", ") + entry->name.terms.title();
      }
  return more > 0 ? text + " and " + std::to_string(more) + " more" : text;
}

// ---- a turn of the thread that polls ----

bool Named::poll(TimePoint) {
  const bool has_work = inbox_full_.load(std::memory_order_acquire) ||
                        unfinished_.load(std::memory_order_relaxed) > 0 || holds_unsent_;
  if (!has_work && !coordinator_) return false;
  bool moved = take_inbox();
  try {
    moved |= exchange();
  } catch (const Error& error) {
    polled_sets_[0]->set.membership.lifeline->report(error);
  } catch (const std::exception& error) {
    polled_sets_[0]->set.membership.lifeline->report(
        Error(ErrorCode::internal, std::string("in the order of names: ") + error.what()));
  }
  moved |= fail_failed();
  moved |= launches_.poll(finished_);
  if (!finished_.empty()) finish(finished_);
  return moved;
}

bool Named::take_inbox() {
  if (!inbox_full_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(mutex_);
  inbox_full_.store(false, std::memory_order_relaxed);
  for (auto& state : new_sets_) {
    if (coordinator_) {
      coordinator_->add_set(state->set.number, state->set.members);
      // Others may submit in a set while this rank does nothing at all.
      if (state->set.place < 0) hold_for(holds_listening_, true);
    }
    polled_sets_.push_back(std::move(state));
  }
  new_sets_.clear();
  for (const uint32_t set : removed_sets_)
    if (coordinator_) coordinator_->drop_set(set);
  removed_sets_.clear();
  for (NamedRequest* request : inbox_) {
    if (request->name == nullptr) {
      joins_.push_back(request);
      ++polled_sets_[0]->unordered;
      participant_.join();
      continue;
    }
    ++polled_sets_[request->name->terms.set]->unordered;
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

bool Named::exchange() {
  const bool moved = coordinator_ ? exchange_as_coordinator() : exchange_as_member();
  if (!decisions_.empty()) {
    apply(decisions_);
    decisions_.clear();
  }
  return moved;
}

bool Named::exchange_as_coordinator() {
  bool moved = false;
  std::vector<std::byte> message;
  while (participant_.take_message(message)) {
    coordinator_->receive(0, message, now());
    moved = true;
  }
  for (size_t r = 1; r < links_.size(); ++r) {
    moved |= links_[r]->poll();
    for (; links_[r]->receive(message); moved = true)  // also what came while it was sending
      coordinator_->receive(static_cast<int>(r), message, now());
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
    moved |= links_[r]->poll();
    unsent |= !links_[r]->sent();
  }
  unsent_.store(unsent, std::memory_order_release);
  hold_for(holds_unsent_, unsent);  // others wait for it, whether or not this rank does
  return moved;
}

bool Named::exchange_as_member() {
  MessageLink& link = *links_[0];
  std::vector<std::byte> message;
  while (participant_.take_message(message)) link.send(std::move(message));
  const bool moved = link.poll();
  if (link.receive(message)) {
    const std::lock_guard lock(mutex_);  // names at rest may be forgotten
    do participant_.receive(message, decisions_);
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
      case Decision::What::stand_in:
        apply_order(d);
        break;
      case Decision::What::refuse:
        if (entry->request == nullptr) break;  // its set has failed meanwhile
        entry->request->error = std::move(d.more->error.front());
        entry->request->ordered = true;
        --polled_sets_[d.name->terms.set]->unordered;
        finished_.push_back(entry->request);
        break;
      case Decision::What::late:
        if (entry->request == nullptr) break;
        entry->request->missing = std::move(d.more->ranks);
        entry->request->told = true;
        next_check_ = TimePoint{};
        break;
      case Decision::What::forget: {
        const std::lock_guard lock(mutex_);
        if (entry->request != nullptr) break;
        const Terms& terms = d.name->terms;
        polled_sets_[terms.set]->entries[static_cast<size_t>(*collective_named(terms.kind))].erase(
            std::string(terms.name));
        break;
      }
      case Decision::What::joined:
        if (joins_.empty()) break;
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

void Named::apply_order(Decision& d) {
  if (d.what == Decision::What::stand_in) {
    auto request = std::make_unique<NamedRequest>();
    request->terms = std::make_unique<Terms>(std::move(d.more->terms));
    const NamedSet& set = polled_sets_.at(request->terms->set)->set;
    launches_.stand_in(std::move(request), set, d.more->extents);
    return;
  }
  NamedRequest* request = static_cast<Entry*>(d.name->owner)->request;
  if (request == nullptr) return;  // its set has failed meanwhile
  SetState& state = *polled_sets_[d.name->terms.set];
  request->ordered = true;
  --state.unordered;
  launches_.add(*request, state.set, d.more && d.more->once ? d.more->extents : d.name->extents);
}

void Named::finish(std::vector<NamedRequest*>& requests) {
  const auto count = static_cast<int>(requests.size());
  {
    const std::lock_guard lock(mutex_);
    for (NamedRequest* request : requests) {
      if (request->name != nullptr)
        static_cast<Entry*>(request->name->owner)->request = nullptr;
      else
        joining_ = false;
    }
  }
  for (NamedRequest* request : requests)
    request->finished.store(true, std::memory_order_release);  // partner: done
  requests.clear();
  if (unfinished_.fetch_sub(count) == count) engine_.let_go();
  engine_.note_finished();
}

// ---- failure ----

/// Requests of failed groups that wait for their order; ordered ones end as their operations do.
bool Named::fail_failed() {
  bool moved = false;
  for (const auto& state : polled_sets_) {
    if (state->unordered == 0 || !state->set.membership.lifeline->failed()) continue;
    const auto verdict = state->set.membership.lifeline->verdict();
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
        if (request == nullptr || request->ordered || entry->name.state == Name::State::resting)
          continue;
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
