#include "named/named.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace farandole {
namespace {

// Packing costs two copies, an operation by itself a few microseconds and no copy.
constexpr size_t kAlone = 128 << 10;
constexpr std::string_view kUnattended = "a framework's operation by name";

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
      engine_, world.membership(), stream_key(world.membership().key, kNegotiationNumber));
  links_.resize(static_cast<size_t>(world.size()));
  for (int r = 0; r < world.size(); ++r)
    if ((r == 0) != (rank_ == 0))
      links_[static_cast<size_t>(r)] = std::make_unique<MessageLink>(connect(r, 1));
  if (rank_ == 0) coordinator_ = std::make_unique<Coordinator>(world.size(), options.ids);
  add_set(&world, world.members());
}

/// Nobody polls any more: what has not come to its end never will.
Named::~Named() {
  for (NamedRequest& request : requests_) {
    if (request.listener == nullptr || request.waits) continue;
    request.error = left_world();
    std::exchange(request.listener, nullptr)->finished(request);
  }
}

// ---- sets ----

uint32_t Named::add_set(Group* group, std::vector<int> members) {
  auto state = std::make_shared<SetState>();
  NamedSet& set = state->set;
  set.members = std::move(members);
  if (group != nullptr) {
    set.rank = group->rank();
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
  if (set == 0 || set >= sets_.size()) throw invalid_argument("there is no such process set");
  sets_[set]->removed = true;
  removed_sets_.push_back(set);
  inbox_full_.store(true, std::memory_order_release);
}

Named::SetState& Named::set_for(uint32_t number) {
  if (number >= sets_.size() || sets_[number]->removed)
    throw invalid_argument("process set " + std::to_string(number) + " is not registered");
  SetState& state = *sets_[number];
  if (!state.set.stream)
    throw invalid_argument("rank " + std::to_string(rank_) + " is not in process set " +
                           std::to_string(number) + " of ranks " +
                           describe_ranks(state.set.members));
  return state;
}

std::pair<int, int> Named::size_and_rank(uint32_t set) {
  const std::lock_guard lock(mutex_);
  const NamedSet& found = set_for(set).set;
  return {found.size(), found.rank};
}

// ---- submissions ----

NamedRequest* Named::submit(const NamedCall& call) {
  if (!call.waits) engine_.driver().require_progress(kUnattended);
  if (engine_.has_left()) throw left_world();
  NamedRequest* request = nullptr;
  {
    const std::lock_guard lock(mutex_);
    SetState& state = set_for(call.set);
    if (state.set.membership.detector->failed())
      if (const auto verdict = state.set.membership.detector->verdict()) throw Error(*verdict);
    Entries& entries = state.entries[static_cast<size_t>(call.kind)];
    uint64_t& nameless = state.nameless[static_cast<size_t>(call.kind)];
    const std::string substitute =
        call.name.empty() ? "noname." + std::to_string(nameless) : std::string();
    const std::string_view called = call.name.empty() ? std::string_view(substitute) : call.name;
    auto found = entries.find(called);
    if (found != entries.end() && found->second->request != nullptr) {
      Context where;
      where.operation = name_of(call.kind);
      where.tensor = called;
      const std::string title = where.operation + " '" + where.tensor + "'";
      throw Error(ErrorCode::invalid_argument,
                  title + " is in flight already on rank " + std::to_string(rank_),
                  std::move(where), "wait for it first, or give each tensor a name of its own");
    }
    if (found == entries.end() || !matches(found->second->name.signature, call)) {
      check(call, state.set);
      if (found == entries.end())
        found = entries.emplace(std::string(called), std::make_unique<Entry>()).first;
      Name& name = found->second->name;
      name.signature = signature_of(call, called);
      name.agreed = false;
      name.owner = found->second.get();
    }
    if (call.name.empty()) ++nameless;  // not for what was refused: others may have gone through
    request = take_request();
    request->name = &found->second->name;
    request->parts.resize(call.tensors.size());
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      request->parts[i].input = call.tensors[i].input;
      request->parts[i].output = call.tensors[i].output;
      if (!call.on_devices.empty()) request->parts[i].on_devices = call.on_devices[i];
    }
    request->listener = call.listener;
    request->waits = call.waits;
    request->gate = call.gate;
    request->completion = call.completion;
    found->second->request = request;
    put_on_its_way(request);
    // Here, and not as it begins: the world may end before, where nobody waits for it.
    if (folds(call.kind)) reductions_begun.fetch_add(1, std::memory_order_relaxed);
  }
  engine_.wake();
  return request;
}

NamedRequest* Named::join(NamedListener* listener, bool waits) {
  if (!waits) engine_.driver().require_progress(kUnattended);
  if (engine_.has_left()) throw left_world();
  NamedRequest* request = nullptr;
  {
    const std::lock_guard lock(mutex_);
    set_for(0);
    if (joining_) throw invalid_argument("rank " + std::to_string(rank_) + " has joined already");
    joining_ = true;
    request = take_request();
    request->joined_at = now();
    request->listener = listener;
    request->waits = waits;
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
  request->submitted = request->ordered = request->told = request->warned = false;
  request->listener = nullptr;
  request->waits = true;
  request->since = TimePoint{};
  request->missing.clear();
  return request;
}

void Named::put_on_its_way(NamedRequest* request) {
  inbox_.push_back(request);
  inbox_full_.store(true, std::memory_order_seq_cst);  // partner: Engine::park
  if (!request->waits) engine_.driver().count_unattended(1);
  if (unfinished_.fetch_add(1) == 0) engine_.hold_on();
}

bool Named::wait(NamedRequest& request, Deadline until) {
  if (done(request)) return true;
  return engine_.driver().wait(request.finished, "operation by name", until);
}

void Named::release(NamedRequest* request) {
  const std::lock_guard lock(mutex_);
  for (NamedRequest::Part& part : request->parts) {
    part.made = {};
    part.on_devices.reset();
  }
  request->gate.reset();
  free_.push_back(request);
}

void Named::flush(Deadline until) {
  const auto is_unsent = [&] {
    return inbox_full_.load(std::memory_order_acquire) || unsent_.load(std::memory_order_acquire);
  };
  while (is_unsent() && !until.passed(now())) engine_.driver().turn(std::chrono::milliseconds(1));
}

void Named::serve(const std::function<void()>& interrupted) {
  if (!coordinator_ || !others_need_order()) return;
  const Deadline until =
      timeout_ > Duration::zero() ? Deadline::after(timeout_) : Deadline::never();
  engine_.begin_leaving();
  while (others_need_order() && !until.passed(now())) {
    interrupted();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // holds_listening_: others poll
  }
}

bool Named::others_need_order() {
  const std::lock_guard lock(mutex_);
  if (sets_[0]->set.membership.detector->failed()) return false;
  return std::ranges::any_of(sets_, [&](const auto& state) {
    const bool foreign = state->set.rank < 0 && !state->removed;
    return foreign && std::ranges::any_of(state->set.members, [&](int r) {
             return !absence_of(engine_.host(), r, {});
           });
  });
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
        text += (text.empty() ? "by name: " : ", ") + entry->name.signature.title();
      }
  return more > 0 ? text + " and " + std::to_string(more) + " more" : text;
}

}  // namespace farandole
