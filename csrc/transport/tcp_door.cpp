#include "transport/tcp_door.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/libcrypto.h"
#include "base/log.h"
#include "base/quiet_thread.h"

namespace farandole {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(50);
constexpr auto kDialPatience = std::chrono::seconds(10);  // where a rank has shown its address
// An address must answer within this time before the next one is tried, and within twice as long in
// each further round. A way across the sea takes a third of it, and a lost packet is sent again.
constexpr auto kFirstAnswer = std::chrono::milliseconds(250);
constexpr size_t kMostDoublings = 4;
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
constexpr auto kBetweenNotes = std::chrono::seconds(10);

void watch_by_number(int epoll, int fd, uint32_t events) {
  watch(epoll, fd, events, static_cast<uint64_t>(fd));
}

std::vector<Fd> one(Fd listener) {
  std::vector<Fd> all;
  all.push_back(std::move(listener));
  return all;
}

std::string joined(const std::vector<std::string>& whys) {
  std::string text;
  for (const std::string& why : whys)
    if (!why.empty()) text += (text.empty() ? "" : "; ") + why;
  return text;
}

Error unreachable(const TcpLane& lane, const std::string& why) {
  Context where;
  where.rank = lane.listener;
  where.peer = lane.listener;
  where.lane = lane.lane;
  where.evidence = "seen by rank " + std::to_string(lane.dialer);
  return {ErrorCode::link,
          "rank " + std::to_string(lane.dialer) + " does not reach rank " +
              std::to_string(lane.listener) + " over TCP: " + why,
          where};
}

}  // namespace

TcpDoor::TcpDoor(std::shared_ptr<Segment> segment, int rank, std::optional<int> family)
    : TcpDoor(std::move(segment), rank, one(listen_on_loopback(family)), {}) {
  segment_->show_address(rank_, addresses_);
}

TcpDoor::TcpDoor(std::shared_ptr<Segment> segment, int rank, std::vector<Fd> listeners,
                 TcpAddresses of_ranks)
    : segment_(std::move(segment)),
      rank_(rank),
      listeners_(std::move(listeners)),
      of_ranks_(std::move(of_ranks)),
      epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(make_event_fd()),
      news_(make_event_fd()) {
  libcrypto();  // where there is none, this says so here, and not in the door's thread
  for (const Fd& listener : listeners_) {
    const TcpAddress::Bytes bytes = TcpAddress::of_listener(listener.get()).bytes();
    addresses_.insert(addresses_.end(), bytes.begin(), bytes.end());
    watch_by_number(epoll_.get(), listener.get(), EPOLLIN);
  }
  watch_by_number(epoll_.get(), wake_.get(), EPOLLIN);
  thread_ = start_quiet_thread("farandole-tcp", [this] { main(); });
}

TcpDoor::~TcpDoor() {
  stopping_.store(true);
  ring(wake_.get());
  thread_.join();
}

std::shared_ptr<TcpArrival> TcpDoor::await(const TcpLane& lane) {
  return ask_for(lane, std::make_shared<TcpArrival>());
}

std::shared_ptr<TcpArrival> TcpDoor::await_again(const TcpLane& lane,
                                                 std::shared_ptr<const Fd> wake) {
  auto arrival = std::make_shared<TcpArrival>();
  arrival->wake = std::move(wake);
  return ask_for(lane, std::move(arrival));
}

std::shared_ptr<TcpArrival> TcpDoor::ask_for(const TcpLane& lane,
                                             std::shared_ptr<TcpArrival> arrival) {
  const std::lock_guard lock(mutex_);
  if (lane.dialer == rank_) {
    Dial dial;
    dial.lane = lane;
    dial.arrival = arrival;
    new_dials_.push_back(std::move(dial));
    ring(wake_.get());
  } else if (const auto early = unclaimed_.find(lane); early != unclaimed_.end()) {
    arrival->connection = std::move(early->second);
    unclaimed_.erase(early);
    arrival->here.store(true, std::memory_order_release);
  } else if (const auto refusal = refused_.find(lane); refusal != refused_.end()) {
    arrival->error = refusal->second;
    arrival->here.store(true, std::memory_order_release);
  } else {
    std::erase_if(awaited_, [](const auto& entry) { return entry.second.expired(); });
    awaited_[lane] = arrival;
  }
  return arrival;
}

void TcpDoor::close_descriptors() {
  if (const std::unique_lock lock(working_, std::try_to_lock); lock)
    for (auto& [socket, visitor] : visitors_) visitor.talk.close();
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock)
    for (auto& [lane, connection] : unclaimed_) connection.socket.reset();
  for (Fd& listener : listeners_) listener.reset();
  for (Fd* fd : {&epoll_, &wake_, &news_}) fd->reset();
}

// ---- the thread ----

void TcpDoor::main() {
  while (!stopping_.load()) {
    try {
      look(time_to_next());
    } catch (const std::exception& error) {  // memory, most likely: others may give some back
      log(LogLevel::error, std::string("TCP connections: ") + error.what());
      std::this_thread::sleep_for(kAcceptPause);
    }
  }
}

void TcpDoor::look(int timeout_ms) {
  epoll_event events[64];
  const int n = ::epoll_wait(epoll_.get(), events, 64, timeout_ms);
  const std::lock_guard lock(working_);
  for (int i = 0; i < n; ++i) {
    const int fd = static_cast<int>(events[i].data.u64);
    if (fd == wake_.get())
      silence(fd);
    else if (std::ranges::find(listeners_, fd, &Fd::get) != listeners_.end())
      let_in(fd);
    else
      advance(fd);
  }
  if (accept_again_ && now() >= *accept_again_) {
    accept_again_.reset();
    for (const Fd& listener : listeners_) watch_by_number(epoll_.get(), listener.get(), EPOLLIN);
  }
  take_dials();
  dial_due();
  drop_impolite();
}

/// In milliseconds, as epoll_wait takes them.
int TcpDoor::time_to_next() const {
  TimePoint next = TimePoint::max();
  for (const Dial& dial : dials_) next = std::min(next, dial.next);
  for (const auto& [socket, visitor] : visitors_) next = std::min(next, visitor.until.at);
  if (accept_again_) next = std::min(next, *accept_again_);
  if (next == TimePoint::max()) return -1;
  const Duration left = Deadline{next}.left(now());
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
}

// ---- connections to this rank ----

void TcpDoor::let_in(int listener) {
  constexpr int kAtOnce = 64;  // others want something, too
  for (int i = 0; i < kAtOnce; ++i) {
    Fd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == ECONNABORTED || errno == EINTR)) continue;
    if (!socket && errno == EAGAIN) return;
    if (!socket) {  // no descriptor to be had, say: not asked again and again
      const bool none_left = errno == EMFILE || errno == ENFILE;
      const Error error = of_this_rank(errno_error("accepting a TCP connection"));
      if (none_left) refuse_awaited(error);
      if (note_is_due()) log(LogLevel::warning, error.verdict());
      for (const Fd& each : listeners_)
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, each.get(), nullptr);
      accept_again_ = now() + kAcceptPause;
      return;
    }
    make_room();
    add({TcpTalk(std::move(socket),
                 TcpHandshake::listen(rank_, segment_->ranks(), segment_->secret())),
         std::nullopt, Deadline::after(kPolite)});
  }
}

/// Drops the client that has been silent longest; a rank of ours dials again.
void TcpDoor::make_room() {
  size_t half_open = 0;
  auto oldest = visitors_.end();
  for (auto it = visitors_.begin(); it != visitors_.end(); ++it) {
    if (it->second.dial) continue;
    ++half_open;
    if (oldest == visitors_.end() || it->second.until.at < oldest->second.until.at) oldest = it;
  }
  if (half_open >= kMostHalfOpen) visitors_.erase(oldest);
}

void TcpDoor::drop_impolite() {
  const TimePoint when = now();
  look_after_dials(when);
  const size_t gone =
      std::erase_if(visitors_, [&](const auto& entry) { return entry.second.until.passed(when); });
  if (gone > 0) note_stranger("it did not say in time who it is");
}

/// Retries dials that get no answer in time. One that is connected is kept: it may stand still.
void TcpDoor::look_after_dials(TimePoint when) {
  std::vector<Dial> unanswered;
  for (auto it = visitors_.begin(); it != visitors_.end();) {
    auto& [socket, visitor] = *it;
    const bool late = visitor.dial && visitor.until.passed(when);
    if (late) visitor.until = Deadline::never();
    if (!late || is_connected(socket)) {
      ++it;
      continue;
    }
    unanswered.push_back(std::move(*visitor.dial));
    it = visitors_.erase(it);
  }
  for (Dial& dial : unanswered) try_again(std::move(dial), std::strerror(ETIMEDOUT));
}

void TcpDoor::add(Visitor visitor) {
  const int socket = visitor.talk.socket();
  // Edges alone: advance() goes on until the socket has nothing more to say.
  watch_by_number(epoll_.get(), socket, EPOLLIN | EPOLLOUT | EPOLLET);
  visitors_.insert_or_assign(socket, std::move(visitor));
  advance(socket);
}

void TcpDoor::advance(int socket) {
  const auto found = visitors_.find(socket);
  if (found == visitors_.end()) return;
  const TcpTalk::State state = found->second.talk.advance();
  if (state == TcpTalk::State::talking) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
  Visitor visitor = std::move(found->second);
  visitors_.erase(found);
  settle(std::move(visitor), state);
}

void TcpDoor::settle(Visitor visitor, TcpTalk::State state) {
  const TcpHandshake& said = visitor.talk.handshake();
  if (state == TcpTalk::State::agreed) {
    prepare_connection(visitor.talk.socket());
    const TcpLane lane = said.lane();
    if (!visitor.dial)
      deliver(lane, visitor.talk.take_connection());
    else if (const auto arrival = visitor.dial->arrival.lock()) {
      reached_[lane.listener] = visitor.dial->at;
      arrival->connection = visitor.talk.take_connection();
      arrived(*arrival);
    }
  } else if (!visitor.dial) {
    if (said.refusal() && said.proved())
      deliver(said.lane(), *said.refusal());
    else
      note_stranger(said.refusal() ? said.refusal()->verdict() : "it went away");
  } else if (state == TcpTalk::State::lost) {
    const int error = visitor.talk.error();
    try_again(std::move(*visitor.dial), error == 0 ? "it hangs up" : std::strerror(error));
  } else {
    if (said.proved())
      give_up(*visitor.dial, *said.refusal());
    else
      take_refusal(std::move(*visitor.dial), *said.refusal());
  }
}

/// A lane that is not asked for yet is kept until it is.
void TcpDoor::deliver(const TcpLane& lane, TcpConnection connection) {
  const std::lock_guard lock(mutex_);
  const auto waiting = awaited_.find(lane);
  if (waiting == awaited_.end()) {
    keep_unclaimed(lane, std::move(connection));
    return;
  }
  const auto arrival = waiting->second.lock();
  awaited_.erase(waiting);
  if (!arrival) return;  // the channel that asked for it has closed
  arrival->connection = std::move(connection);
  arrived(*arrival);
}

/// Refuses a rank of ours that speaks another format: the caller that awaits the lane learns why.
void TcpDoor::deliver(const TcpLane& lane, const Error& refusal) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<TcpArrival> arrival;
  if (const auto waiting = awaited_.find(lane); waiting != awaited_.end()) {
    arrival = waiting->second.lock();
    awaited_.erase(waiting);
  }
  if (arrival) {
    arrival->error = refusal;
    arrived(*arrival);
  } else if (refused_.size() < kMostUnclaimed) {
    refused_.try_emplace(lane, refusal);
  }
}

void TcpDoor::keep_unclaimed(const TcpLane& lane, TcpConnection connection) {
  if (unclaimed_.size() >= kMostUnclaimed)
    std::erase_if(unclaimed_,
                  [](const auto& entry) { return has_hung_up(entry.second.socket.get()); });
  if (unclaimed_.size() >= kMostUnclaimed)
    log(LogLevel::error, "rank " + std::to_string(lane.dialer) + " has opened " +
                             std::to_string(kMostUnclaimed) +
                             " TCP connections that nobody here has asked for; no more are kept");
  else
    unclaimed_.insert_or_assign(lane, std::move(connection));
}

void TcpDoor::arrived(TcpArrival& arrival) {
  arrival.here.store(true, std::memory_order_release);  // partner: TcpChannel::connected
  ring(arrival.wake ? arrival.wake->get() : news_.get());
}

void TcpDoor::note_stranger(const std::string& why) {
  if (note_is_due()) log(LogLevel::info, "a TCP connection to this rank was dropped: " + why);
}

bool TcpDoor::note_is_due() {
  if (now() < next_note_) return false;
  next_note_ = now() + kBetweenNotes;
  return true;
}

Error TcpDoor::of_this_rank(const Error& error) const {
  Context where;
  where.rank = rank_;
  where.pid = ::getpid();
  return {error.code(), "rank " + std::to_string(rank_) + ": " + error.verdict(), std::move(where),
          error.advice()};
}

/// Else callers here would wait for these lanes for ever, and all other ranks for this one.
void TcpDoor::refuse_awaited(const Error& error) {
  const std::lock_guard lock(mutex_);
  for (const auto& [lane, waiting] : std::exchange(awaited_, {}))
    if (const auto arrival = waiting.lock()) {
      arrival->error = error;
      arrived(*arrival);
    }
}

// ---- connections from this rank ----

void TcpDoor::take_dials() {
  const std::lock_guard lock(mutex_);
  for (Dial& dial : new_dials_) dials_.push_back(std::move(dial));
  new_dials_.clear();
}

void TcpDoor::dial_due() {
  const TimePoint when = now();
  std::vector<Dial> due;
  std::erase_if(dials_, [&](Dial& dial) {
    if (dial.arrival.expired()) return true;
    if (dial.next > when) return false;
    due.push_back(std::move(dial));
    return true;
  });
  for (Dial& dial : due) begin(std::move(dial));
}

std::vector<std::byte> TcpDoor::addresses_of(int rank) const {
  return of_ranks_.empty() ? segment_->address_of(rank) : of_ranks_[static_cast<size_t>(rank)];
}

void TcpDoor::begin(Dial dial) {
  const std::vector<std::byte> shown = addresses_of(dial.lane.listener);
  if (shown.empty()) return wait_for(std::move(dial));  // not there yet
  const auto addresses = TcpAddress::all_from(shown);
  if (!addresses) return give_up(dial, unreachable(dial.lane, "what it has shown is no address"));
  const size_t count = addresses->size();
  dial.whys.resize(count);
  const size_t doublings = std::min(dial.tries / count, kMostDoublings);
  dial.at = (reached_[dial.lane.listener] + dial.tries++) % count;
  const TcpAddress& address = (*addresses)[dial.at];
  dial.whys[dial.at] = address.text() + ": ";
  Fd socket = begin_to_connect(address);
  if (!socket && (errno == EMFILE || errno == ENFILE))
    return give_up(dial, of_this_rank(errno_error("opening a TCP socket")));
  if (!socket) return try_again(std::move(dial), std::strerror(errno));
  const TcpLane lane = dial.lane;
  add({TcpTalk(std::move(socket), TcpHandshake::dial(lane, segment_->secret())), std::move(dial),
       Deadline::after(kFirstAnswer * (1 << doublings))});
}

void TcpDoor::give_up(const Dial& dial, const Error& error) {
  const auto arrival = dial.arrival.lock();
  if (!arrival) return;
  arrival->error = error;
  arrived(*arrival);
}

/// Tries again after a pause; for ever while the other rank has shown no address.
void TcpDoor::wait_for(Dial dial) {
  dial.pause = std::clamp<Duration>(dial.pause * 2, kFirstPause, kLongestPause);
  dial.next = now() + dial.pause;
  dials_.push_back(std::move(dial));
}

/// Tries the next address at once; after the last one, the first again after a pause.
void TcpDoor::try_again(Dial dial, const std::string& why) {
  const TimePoint when = now();
  dial.whys[dial.at] += why;
  if (dial.give_up.at == TimePoint::max()) dial.give_up = Deadline{when + kDialPatience};
  const bool all_tried = dial.tries % dial.whys.size() == 0;
  if (all_tried && dial.refusal) return give_up(dial, *dial.refusal);
  const auto arrival = dial.arrival.lock();
  const bool was_enough = all_tried && arrival && arrival->wake;
  if (was_enough || dial.give_up.passed(when))
    return give_up(dial, unreachable(dial.lane, joined(dial.whys)));
  if (all_tried) return wait_for(std::move(dial));
  dial.next = when;
  dials_.push_back(std::move(dial));
}

/// Another machine may have that address in a network of its own, so the others are tried as well.
void TcpDoor::take_refusal(Dial dial, const Error& refusal) {
  if (!dial.refusal) dial.refusal = refusal;
  try_again(std::move(dial), refusal.verdict());
}

}  // namespace farandole
