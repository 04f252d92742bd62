#include "engine/engine.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>

#include "base/relax.h"
#include "control/control_mesh.h"
#include "control/farewell.h"
#include "engine/fork.h"
#include "stream/bytes_begun.h"

namespace farandole {
namespace {

constexpr uint64_t kTurnsBetweenEvents = 4096;
constexpr auto kEndPatience = std::chrono::seconds(3);
Crowding crowding_of(const Host& host) {
  CpuSet cpus;
  bool share_one = false;  // two ranks pinned to the same single core
  const size_t ranks = host.ranks_here().size();
  for (size_t a = 0; a < host.peers.size(); ++a) {
    cpus |= host.peers[a].cpus;  // none, where it is elsewhere
    for (size_t b = 0; b < a; ++b)
      share_one |= host.peers[a].cpus.count() == 1 && host.peers[a].cpus == host.peers[b].cpus;
  }
  const size_t cores = cpus.count();
  return {.spare = cores > ranks && !share_one, .crowded = cores < ranks || share_one};
}

/// Ranks of one host need no name of it, and have none.
std::string host_name(const Host& host) {
  if (host.mesh) return host.peers[static_cast<size_t>(host.rank)].info.host;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

Engine::Engine(Host host, EngineOptions options)
    : host_(std::move(host)),
      options_(std::move(options)),
      arena_(std::make_shared<Arena>(host_.segment, host_.rank)),
      epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      dead_(host_.peers.size()),
      deaths_(host_.peers.size()),
      waits_(host_, options_.warn_after),
      status_({options_.job, host_name(host_), host_.rank, host_.size()}),
      driver_(*this, options_.spin, crowding_of(host_), options_.progress, options_.threads,
              options_.few_threads) {
  set_trace(options_.trace);
  if (options_.transports) transports_ = options_.transports(*this);
  watch_events();
}

Engine::~Engine() {
  leave();
  driver_.stop();
  // Nobody else polls any more. What is in flight fails and its completions run; peers that are
  // inside its memory come out first, or are killed.
  const Deadline patience = Deadline::after(kEndPatience);
  while (busy() && !patience.passed(now())) {
    park(std::chrono::milliseconds(1));
    run_completions();
  }
  run_completions();
  end_tasks();
  show_state(RankState::gone);
}

std::shared_ptr<TcpDoor> Engine::door() const { return host_.mesh ? host_.mesh->door() : nullptr; }

void Engine::set_trace(const std::shared_ptr<Trace>& trace) {
  const std::lock_guard lock(traces_mutex_);
  if (trace) traces_.push_back(trace);
  trace_.store(trace.get(), std::memory_order_release);  // partner: trace()
}

std::shared_ptr<Stream> Engine::open_stream(const Membership& membership, std::string label,
                                            uint64_t number, bool schedules) {
  sweep();
  const uint64_t key = stream_key(membership.key, number);
  auto* stream = new Stream(view(), membership, std::move(label), key, options_.first_sequence,
                            agree_over(membership, key));
  ++closed_->open_streams;
  const std::shared_ptr<Stream> opened(stream, [closed = closed_](Stream* closing) {
    if (in_child()) return;  // what it refers to belongs to the parent
    std::optional<ClosedPage> page = closing->leave_behind();
    delete closing;
    --closed->open_streams;
    if (!page) return;
    const std::lock_guard lock(closed->mutex);
    closed->pages.push_back(std::move(*page));
  });
  const auto add = [&](const BackendMaker& make) {
    if (make) opened->add_backend(make(*this, membership, key, opened->memory()));
  };
  const bool here = host_.are_here(membership.members);
  add(here ? options_.direct : options_.eager);
  if (schedules || options_.pairs_by_schedules || !here) add(options_.schedules);
  return opened;
}

/// The channels over which a stream's ranks agree, where they share no memory.
Connect Engine::agree_over(const Membership& membership, uint64_t key) const {
  if (host_.are_here(membership.members)) return {};
  return options_.channels(*this, membership, stream_key(key, kAgreementNumber));
}

std::shared_ptr<FailureDetector> Engine::share_detector(std::unique_ptr<FailureDetector> detector,
                                                        uint64_t key, std::byte* owned,
                                                        const std::vector<int>& members) {
  ClosedPage page{key, owned, {}};
  for (const int member : members)
    if (member != host_.rank && host_.is_here(member)) page.readers.push_back({member, false});
  return {detector.release(), [page, closed = closed_, segment = host_.segment,
                               rank = host_.rank](FailureDetector* ending) {
            delete ending;
            if (in_child()) return;  // what it refers to belongs to the parent
            segment->close(rank, page.key);
            const std::lock_guard lock(closed->mutex);
            closed->pages.push_back(page);
          }};
}

/// Gives back the pages of closed streams that no peer will read again: it has closed the stream
/// too, or is gone. A peer that has not opened it yet may still do so, and will find ours.
void Engine::sweep() {
  const Segment& segment = *host_.segment;
  const std::lock_guard lock(closed_->mutex);
  std::erase_if(closed_->pages, [&](ClosedPage& page) {
    std::erase_if(page.readers, [&](ClosedPage::Reader& reader) {
      reader.met = reader.met || segment.listed(reader.rank, page.key);
      if (reader.met) return segment.closed(reader.rank, page.key);
      return segment.state_of(reader.rank) == RankState::gone;
    });
    if (!page.readers.empty()) return false;
    host_.segment->withdraw(host_.rank, page.key);
    arena_->release(page.memory);
    return true;
  });
}

EngineView Engine::view() const {
  return {{&host_, &dead_, &deaths_}, arena_, options_.warn_after, &trace_, &waits_};
}

// ---- tasks ----

void Engine::add_task(std::shared_ptr<Task> task) {
  {
    const std::lock_guard lock(inbox_mutex_);
    new_tasks_.push_back(std::move(task));
    inbox_full_.store(true, std::memory_order_seq_cst);  // partner: park
  }
  wake();
}

void Engine::drop_task(const std::shared_ptr<Task>& task) {
  const std::lock_guard lock(inbox_mutex_);
  old_tasks_.push_back(task);
  inbox_full_.store(true, std::memory_order_release);  // whenever it is next driven
}

void Engine::launch(const std::shared_ptr<Stream>& stream, std::shared_ptr<Request> request) {
  if (trace() != nullptr) request->submitted = now();
  in_flight_.fetch_add(1);  // seq_cst; partner: Driver::progress_main
  enqueue(stream, std::move(request));
}

void Engine::hold_on() {
  held_.fetch_add(1, std::memory_order_relaxed);  // no partner: read where it was written
  in_flight_.fetch_add(1);                        // seq_cst; partner: Driver::progress_main
  driver_.note_submission();
}

void Engine::let_go() {
  held_.fetch_sub(1, std::memory_order_relaxed);
  in_flight_.fetch_sub(1, std::memory_order_release);
}

void Engine::keep_driving() {
  if (kept_driving_.exchange(true)) return;  // partner: Driver::progress_main
  held_.fetch_add(1, std::memory_order_relaxed);
  driver_.note_submission();
}

// ---- submissions ----

void Engine::note_arrival(Request& request) {
  if (left_.load(std::memory_order_relaxed)) throw left_world();
  request.submitted = trace() != nullptr ? now() : TimePoint{};
  in_flight_.fetch_add(1);  // seq_cst; partner: Driver::progress_main
}

void Engine::put(const std::shared_ptr<Stream>& stream, std::shared_ptr<Request> request) {
  {
    const std::lock_guard lock(inbox_mutex_);
    inbox_.push_back({stream, std::move(request)});
    inbox_full_.store(true, std::memory_order_seq_cst);  // partner: park
  }
  wake();
}

Handle Engine::submit(const std::shared_ptr<Stream>& stream, Operation operation,
                      bool caller_waits) {
  if (caller_waits) driver_.require_waiter();
  auto request = std::make_shared<Request>();
  request->operation = std::move(operation);
  note_arrival(*request);
  put(stream, request);
  if (!caller_waits) driver_.note_submission();
  return {shared_from_this(), std::move(request)};
}

bool Engine::run(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Request>& request,
                 int looks) {
  driver_.require_waiter();
  note_arrival(*request);
  if (driver_.crowded()) looks = std::min(looks, 1);  // the others need this core to come
  if (trace() != nullptr ||
      !driver_.with_token([&] { return run_alone(stream, request, looks); })) {
    put(stream, request);
    return false;
  }
  if (!request->finished.load(std::memory_order_acquire)) return false;
  driver_.hand_over();
  return true;
}

/// By the thread that holds the token. False, and nothing is done, when other operations are in
/// flight: those that were submitted before it must stay before it.
bool Engine::run_alone(const std::shared_ptr<Stream>& stream,
                       const std::shared_ptr<Request>& request, int looks) {
  if (!active_.empty() || inbox_full_.load(std::memory_order_acquire) ||
      held_.load(std::memory_order_relaxed) > 0)
    return false;
  stream->enqueue(request);
  for (; looks > 0; --looks) {
    const bool moved = stream->poll(TimePoint::min()) == Progress::moved;
    if (moved) {
      collect(*stream);
      ring_sleepers();
    }
    if (!stream->busy()) return true;
    if (!moved) relax();  // some processors take a tenth of a small operation for it
  }
  active_.push_back(stream);
  return true;
}

void Engine::wake() {
  if (my_page().asleep.value.load(std::memory_order_seq_cst) != 0)  // partner: park
    ring(host_.peers[static_cast<size_t>(host_.rank)].doorbell.get());
}

void Engine::wake_everyone() {
  for (const HostPeer& peer : host_.peers)
    if (peer.here) ring(peer.doorbell.get());
}

void Engine::take_submissions() {
  std::vector<Submission> taken;
  std::vector<std::shared_ptr<Task>> dropped;
  {
    const std::lock_guard lock(inbox_mutex_);
    taken.swap(inbox_);
    for (auto& task : new_tasks_) tasks_.push_back(std::move(task));
    new_tasks_.clear();
    dropped.swap(old_tasks_);
    inbox_full_.store(false, std::memory_order_relaxed);
  }
  for (const auto& task : dropped) std::erase(tasks_, task);
  for (Submission& s : taken) enqueue(s.stream, std::move(s.request));
}

void Engine::enqueue(const std::shared_ptr<Stream>& stream, std::shared_ptr<Request> request) {
  stream->enqueue(std::move(request));
  if (std::find(active_.begin(), active_.end(), stream) == active_.end()) active_.push_back(stream);
}

// ---- turns ----

bool Engine::poll(TimePoint until) {
  if (inbox_full_.load(std::memory_order_acquire)) take_submissions();
  Trace* const traced = trace();
  const TimePoint begin = traced != nullptr ? now() : TimePoint{};
  bool moved = false;
  for (size_t i = 0; i < active_.size();) {
    Stream& stream = *active_[i];
    if (stream.poll(until) == Progress::moved) {
      moved = true;
      collect(stream);
    }
    if (stream.busy())
      ++i;
    else
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (const auto& task : tasks_) moved |= task->poll(until);
  if (moved) end_idle();
  if (moved && traced != nullptr) traced->turn(begin, now());
  if (moved) ring_sleepers();
  // Nobody may poll for a while: what this rank has waited in is not what it waits in now.
  if (moved && waits_.shows() && !busy()) waits_.look(now(), {});
  const uint64_t turns = turns_.load(std::memory_order_relaxed) + 1;  // no partner: a statistic
  turns_.store(turns, std::memory_order_relaxed);
  if (turns % kTurnsBetweenEvents == 0) {  // a busy engine never parks
    handle_events(0);
    look_around();
  }
  return moved;
}

/// A program may go on without a group of some ranks.
bool Engine::is_of_all(const Stream& stream) const {
  return stream.membership().members.size() == host_.peers.size();
}

void Engine::collect(Stream& stream) {
  std::vector<std::shared_ptr<Request>>& finished = stream.finished();
  if (finished.empty()) return;
  ended_ += finished.size();
  status_.show_ended(ended_, bytes_begun.load(std::memory_order_relaxed));
  in_flight_.fetch_sub(static_cast<int>(finished.size()), std::memory_order_release);
  driver_.note_finished();
  for (auto& request : finished) {
    if (request->error && is_of_all(stream) && stream.membership().detector->failed())
      status_.show_verdict(*request->error);
    if (!request->operation.completion) continue;
    complete([request = std::move(request)] {
      request->operation.completion(request->error ? &*request->error : nullptr);
    });
  }
  finished.clear();
}

void Engine::complete(std::function<void()> completion) {
  const std::lock_guard lock(completions_mutex_);
  completions_.push_back(std::move(completion));
  completions_full_.store(true, std::memory_order_release);
}

void Engine::run_completions() {
  while (completions_full_.load(std::memory_order_acquire)) {
    std::vector<std::function<void()>> ready;
    {
      const std::lock_guard lock(completions_mutex_);
      ready.swap(completions_);
      completions_full_.store(false, std::memory_order_relaxed);
    }
    for (const auto& completion : ready) completion();
  }
}

/// Wakes parked peers, which may wait for data that moved.
void Engine::ring_sleepers() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // partner: park
  for (const HostPeer& peer : host_.peers) {
    if (!peer.here || peer.info.rank == host_.rank) continue;
    if (host_.segment->page(peer.info.rank).asleep.value.load(std::memory_order_relaxed) != 0)
      ring(peer.doorbell.get());
  }
}

// ---- the end ----

void Engine::show_state(RankState state) {
  host_.segment->show_state(host_.rank, state);
  status_.show_state(state);
  if (host_.mesh) host_.mesh->tell_state();
}

void Engine::begin_leaving() {
  show_state(RankState::leaving);
  wake_everyone();
}

void Engine::show_end(std::string_view what, std::string_view place) {
  show_exception(*host_.segment, host_.rank, what, place);
  show_state(RankState::left);
  wake_everyone();
}

void Engine::leave() {
  left_.store(true, std::memory_order_relaxed);
  show_state(RankState::left);
  end_questions(my_page().board);
  wake_everyone();  // those who wait for us must look around
}

/// A thread that waits for an operation, which fails, may have the token for a while.
void Engine::end_tasks() {
  const auto end_all = [this] {
    if (inbox_full_.load(std::memory_order_acquire)) take_submissions();
    const bool awaited = std::ranges::any_of(tasks_, [](const auto& t) { return t->is_awaited(); });
    const Deadline end = Deadline::after(kEndPatience);
    while (awaited && busy() && !end.passed(now())) park(std::chrono::milliseconds(1));
    for (const auto& task : tasks_) task->leave();
    return true;
  };
  const Deadline patience = Deadline::after(kEndPatience);
  while (!driver_.with_token(end_all) && !patience.passed(now()))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::optional<Error> Engine::leave_transports() {
  std::optional<Error> lost;
  for (const HostPeer& peer : host_.peers) {
    if (peer.info.rank == host_.rank) continue;
    auto gone = absence_of(host_, peer.info.rank, "before this rank left");
    if (!gone || gone->code() != ErrorCode::peer_lost) continue;
    for (const auto& transport : transports_) transport->lose(peer.info.rank);
    if (!lost) lost = std::move(gone);
  }
  for (const auto& transport : transports_) transport->leave();
  return lost;
}

void Engine::close_descriptors() {
  epoll_.reset();
  for (const auto& transport : transports_) transport->close_descriptors();
  for (HostPeer& peer : host_.peers) {
    peer.doorbell.reset();
    peer.process.reset();
  }
  if (host_.mesh) host_.mesh->close_descriptors();
  host_.segment->close_descriptor();
  status_.close_descriptor();
}

EngineCounters Engine::counters() const {
  return {turns_.load(std::memory_order_relaxed), arena_->bytes_in_use(), arena_->allocations(),
          closed_->open_streams.load()};
}

std::string Engine::describe() {
  std::string text;
  for (const auto& stream : active_) text += stream->describe() + "\n";
  return text;
}

}  // namespace farandole
