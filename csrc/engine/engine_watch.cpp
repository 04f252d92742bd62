// The engine while nothing moves: it sleeps, is woken, and watches the other ranks.

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "base/fault.h"
#include "control/control_mesh.h"
#include "control/deaths.h"
#include "control/failure_detector.h"
#include "engine/engine.h"

namespace farandole {
namespace {

// Time for the cause of a death to be known: here, and from other ranks (control/control_mesh.h).
constexpr auto kDeathPatience = std::chrono::milliseconds(25);
constexpr auto kHearsayPatience = std::chrono::milliseconds(100);
// Between looks of a parked engine that nothing wakes: a fourth longer each time, so that what it
// waits for is late by a fifth at most. Ranks of one host ring each other, whatever data go over,
// and look for what MPI wants of them alone.
constexpr Duration kFirstPause = std::chrono::microseconds(50);
constexpr Duration kLongestPause = std::chrono::milliseconds(4);
constexpr Duration kLongestPauseHere = std::chrono::milliseconds(25);

// Sources of an epoll event; a number below kTransport is the process of that rank.
constexpr uint64_t kDoorbell = ~uint64_t{0};
constexpr uint64_t kTransport = uint64_t{1} << 32;  // plus its index

}  // namespace

void Engine::watch_events() {
  watch(epoll_.get(), host_.peers[static_cast<size_t>(host_.rank)].doorbell.get(), EPOLLIN,
        kDoorbell);
  for (const HostPeer& peer : host_.peers)
    if (peer.process && peer.info.rank != host_.rank)
      watch(epoll_.get(), peer.process.get(), EPOLLIN, static_cast<uint64_t>(peer.info.rank));
  for (size_t i = 0; i < transports_.size(); ++i)
    for (const int fd : transports_[i]->wake_fds())
      watch(epoll_.get(), fd, EPOLLIN, kTransport + i);
}

bool Engine::has_to_ask() const {
  return std::ranges::any_of(transports_, [](const auto& t) { return t->has_to_be_asked(); });
}

void Engine::park(Duration at_most) {
  std::atomic<uint64_t>& asleep = my_page().asleep.value;
  asleep.store(1, std::memory_order_seq_cst);  // partners: ring_sleepers of peers, wake
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!poll(TimePoint::min())) {
    show_idle();
    const TraceSpan parked(trace(), TraceKind::parked, "parked");
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(at_most).count();
    for (const auto& transport : transports_) transport->before_park();
    for (const auto& task : tasks_) task->before_park();
    const bool look_again = !unexplained_.empty() || fault_latency_armed();
    if (has_to_ask())
      ask_now_and_then(Deadline::after(look_again ? std::chrono::milliseconds(1) : at_most));
    else
      handle_events(look_again ? 1 : static_cast<int>(ms));
  }
  asleep.store(0, std::memory_order_relaxed);
  look_around();
}

/// Sleeps where not all that moves this rank also wakes it.
void Engine::ask_now_and_then(Deadline until) {
  pollfd events{epoll_.get(), POLLIN, 0};
  const bool rung = !host_.mesh;
  Duration pause = kFirstPause;
  for (TimePoint when = now(); !until.passed(when); when = now()) {
    const auto ns = std::chrono::nanoseconds(std::min(pause, until.left(when)));
    const timespec time{0, static_cast<long>(ns.count())};
    if (::ppoll(&events, 1, &time, nullptr) > 0) return handle_events(0);
    for (const auto& transport : transports_) transport->before_park();
    if (poll(TimePoint::min())) return;
    pause =
        rung ? std::min(2 * pause, kLongestPauseHere) : std::min(pause + pause / 4, kLongestPause);
  }
}

void Engine::handle_events(int timeout_ms) {
  epoll_event events[16];
  const int n = ::epoll_wait(epoll_.get(), events, 16, timeout_ms);
  for (int i = 0; i < n; ++i) {
    const uint64_t what = events[i].data.u64;
    if (what == kDoorbell)
      silence(host_.peers[static_cast<size_t>(host_.rank)].doorbell.get());
    else if (what >= kTransport)
      transports_[static_cast<size_t>(what - kTransport)]->woken();
    else
      note_death(static_cast<int>(what));
  }
}

void Engine::note_death(int rank) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, host_.peers[static_cast<size_t>(rank)].process.get(),
              nullptr);
  unexplained_.push_back({rank, now()});
}

bool Engine::may_have_gone(int rank, TimePoint before) const {
  const bool hears_of_it = host_.mesh && !host_.peers[static_cast<size_t>(rank)].here;
  if (hears_of_it && (!host_.mesh->has_settled(rank, before) || host_.mesh->has_lost(rank)))
    return true;
  return dead_[static_cast<size_t>(rank)] || absence_of(host_, rank, "").has_value();
}

void Engine::look_around() {
  const TimePoint when = now();
  note_lost_connections(when);
  std::erase_if(unexplained_, [&](const auto& entry) {
    const auto [rank, since] = entry;
    const std::optional<Death> death = known_death(rank);
    if (!death && when - since < patience_with(rank)) return false;
    deaths_[static_cast<size_t>(rank)] = death.value_or(Death{});
    note_dead(rank);
    return true;
  });
  look_at_waits(when);
  for (const auto& stream : active_) stream->look_around(when);
  for (const auto& task : tasks_) task->look_around(when);
  // A rank that rang without having reported would wake others that do the same, for ever.
  if (const uint64_t reports = reports_made.load(); std::exchange(rung_for_, reports) != reports)
    ring_sleepers();
}

void Engine::note_lost_connections(TimePoint when) {
  if (!host_.mesh) return;
  for (const HostPeer& peer : host_.peers) {
    const int rank = peer.info.rank;
    const bool is_new =
        !dead_[static_cast<size_t>(rank)] &&
        std::ranges::find(unexplained_, rank, &Unexplained::rank) == unexplained_.end();
    if (!peer.here && host_.mesh->has_lost(rank) && is_new) unexplained_.push_back({rank, when});
  }
}

std::optional<Death> Engine::known_death(int rank) const {
  const HostPeer& peer = host_.peers[static_cast<size_t>(rank)];
  return peer.here ? death_of(peer.process.get(), peer.info.pid) : host_.mesh->told_death(rank);
}

/// Zero where no process is left that could report how it ended.
Duration Engine::patience_with(int rank) const {
  if (host_.is_here(rank)) return kDeathPatience;
  if (host_.mesh->has_lost_sight_of(rank) || !host_.mesh->distrust(rank).empty()) return {};
  const auto sees_it = [&](const HostPeer& other) {
    const int r = other.info.rank;
    return r != rank && host_.share_one(r, rank) && !host_.mesh->has_lost(r);
  };
  const bool hears = host_.mesh->hears_launcher() || std::ranges::any_of(host_.peers, sees_it);
  return hears ? kHearsayPatience : Duration{};
}

void Engine::note_dead(int rank) {
  if (dead_[static_cast<size_t>(rank)]) return;
  dead_[static_cast<size_t>(rank)] = true;
  for (const auto& transport : transports_) transport->lose(rank);
}

WaitList Engine::waits() const {
  WaitList list;
  for (const auto& stream : active_) stream->list_waits(list);
  for (const auto& task : tasks_) task->list_waits(list);
  return list;
}

// ---- how long this rank waits, for those who look from outside ----

void Engine::note_idle(TimePoint since) {
  const auto own = [](const auto& stream) { return stream->awaits_own_input(); };
  if (idle_since_ != TimePoint{} || !busy()) return;
  if (!active_.empty() && std::ranges::all_of(active_, own)) return;  // copies from its own device
  idle_since_ = since;
  const auto late = [](const auto& stream) { return stream->awaits_ranks(); };
  idle_for_ = std::ranges::any_of(active_, late) ? WaitKind::for_ranks : WaitKind::for_data;
}

/// The wait is a long one.
void Engine::show_idle() {
  if (idle_since_ == TimePoint{} || status_.shows_wait()) return;
  const WaitList list = waits();
  const auto held_up = [](const Wait& wait) { return wait.kind != Wait::moving; };
  const auto found = std::ranges::find_if(list.waits, held_up);
  if (found == list.waits.end()) return status_.show_wait(idle_since_, "", {});
  idle_for_ = WaitKind::for_ranks;
  status_.show_wait(idle_since_, list.titles.front(), found->needed());
}

void Engine::end_idle() {
  if (idle_since_ == TimePoint{}) return;
  status_.add_wait(idle_for_, now() - std::exchange(idle_since_, TimePoint{}));
  status_.end_wait();
}

// ---- waits that never end ----

/// Shows what this rank waits in; a deadlock that it is in ends all of that.
void Engine::look_at_waits(TimePoint when) {
  if (host_.size() == 1 || !waits_.due(when, ended_)) return;
  const std::optional<Error> deadlock = waits_.look(when, waits());
  if (!deadlock) return;
  for (const auto& stream : active_) stream->membership().detector->report(*deadlock);
  for (const auto& task : tasks_) task->fail_waits(*deadlock);
}

}  // namespace farandole
