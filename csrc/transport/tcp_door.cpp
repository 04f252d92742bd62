#include "transport/tcp_door.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace farandole {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(50);
constexpr auto kDialPatience = std::chrono::seconds(10);  // where a rank has shown its address
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
constexpr auto kBetweenNotes = std::chrono::seconds(10);

void watch(int epoll, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  checked(::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
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

bool has_hung_up(const Fd& socket) {
  std::byte next{};
  const ssize_t count = ::recv(socket.get(), &next, 1, MSG_PEEK);
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace

TcpDoor::TcpDoor(std::shared_ptr<Segment> segment, int rank, std::optional<int> family)
    : TcpDoor(std::move(segment), rank, listen_on_loopback(family)) {}

TcpDoor::TcpDoor(std::shared_ptr<Segment> segment, int rank, Fd listener)
    : segment_(std::move(segment)),
      rank_(rank),
      listener_(std::move(listener)),
      epoll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(make_event_fd()),
      news_(make_event_fd()),
      address_(TcpAddress::of_listener(listener_.get())) {
  watch(epoll_.get(), listener_.get(), EPOLLIN);
  watch(epoll_.get(), wake_.get(), EPOLLIN);
  sigset_t all, before;  // signals are for the program's own threads
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string refused;
  try {
    thread_ = std::thread([this] { main(); });
  } catch (const std::system_error& error) {
    refused = error.what();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!refused.empty())
    throw Error(ErrorCode::resource, "starting the thread of TCP connections failed: " + refused);
  segment_->show_address(rank_, address_.bytes());
}

TcpDoor::~TcpDoor() {
  stopping_.store(true);
  ring(wake_.get());
  thread_.join();
}

std::shared_ptr<TcpArrival> TcpDoor::await(const TcpLane& lane) {
  auto arrival = std::make_shared<TcpArrival>();
  const std::lock_guard lock(mutex_);
  if (lane.dialer == rank_) {
    Dial dial;
    dial.lane = lane;
    dial.arrival = arrival;
    new_dials_.push_back(std::move(dial));
    ring(wake_.get());
  } else if (const auto early = unclaimed_.find(lane); early != unclaimed_.end()) {
    arrival->socket = std::move(early->second);
    unclaimed_.erase(early);
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
    for (auto& [lane, socket] : unclaimed_) socket.reset();
  for (Fd* fd : {&listener_, &epoll_, &wake_, &news_}) fd->reset();
}

// ---- the thread ----

void TcpDoor::main() {
  ::pthread_setname_np(::pthread_self(), "farandole-tcp");
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
    const int fd = events[i].data.fd;
    if (fd == wake_.get())
      silence(fd);
    else if (fd == listener_.get())
      let_in();
    else
      advance(fd);
  }
  if (accept_again_ && now() >= *accept_again_) {
    accept_again_.reset();
    watch(epoll_.get(), listener_.get(), EPOLLIN);
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

// ---- who comes ----

void TcpDoor::let_in() {
  constexpr int kAtOnce = 64;  // others want something, too
  for (int i = 0; i < kAtOnce; ++i) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == ECONNABORTED || errno == EINTR)) continue;
    if (!socket && errno == EAGAIN) return;
    if (!socket) {  // no descriptor to be had, say: not asked again and again
      log(LogLevel::warning, std::string("accepting a TCP connection: ") + std::strerror(errno));
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      accept_again_ = now() + kAcceptPause;
      return;
    }
    make_room();
    add({TcpTalk(std::move(socket),
                 TcpHandshake::listen(rank_, segment_->ranks(), segment_->secret())),
         std::nullopt, Deadline::after(kPolite)});
  }
}

/// The one that has been silent longest goes; a rank of ours dials again.
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
  const size_t gone =
      std::erase_if(visitors_, [&](const auto& entry) { return entry.second.until.passed(when); });
  if (gone > 0) note_stranger("it did not say in time who it is");
}

void TcpDoor::add(Visitor visitor) {
  const int socket = visitor.talk.socket();
  // Edges alone: advance() goes on until the socket has nothing more to say.
  watch(epoll_.get(), socket, EPOLLIN | EPOLLOUT | EPOLLET);
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
      deliver(lane, visitor.talk.take_socket());
    else if (const auto arrival = visitor.dial->arrival.lock()) {
      arrival->socket = visitor.talk.take_socket();
      arrived(*arrival);
    }
  } else if (!visitor.dial) {
    note_stranger(said.refusal() ? said.refusal()->verdict() : "it went away");
  } else if (state == TcpTalk::State::lost) {
    const int error = visitor.talk.error();
    try_again(std::move(*visitor.dial), error == 0 ? "it hangs up" : std::strerror(error));
  } else {
    give_up(*visitor.dial, *said.refusal());
  }
}

/// A lane that is not asked for yet is kept until it is.
void TcpDoor::deliver(const TcpLane& lane, Fd socket) {
  const std::lock_guard lock(mutex_);
  const auto waiting = awaited_.find(lane);
  if (waiting == awaited_.end()) {
    keep_unclaimed(lane, std::move(socket));
    return;
  }
  const auto arrival = waiting->second.lock();
  awaited_.erase(waiting);
  if (!arrival) return;  // who asked for it has closed
  arrival->socket = std::move(socket);
  arrived(*arrival);
}

void TcpDoor::keep_unclaimed(const TcpLane& lane, Fd socket) {
  if (unclaimed_.size() >= kMostUnclaimed)
    std::erase_if(unclaimed_, [](const auto& entry) { return has_hung_up(entry.second); });
  if (unclaimed_.size() >= kMostUnclaimed)
    log(LogLevel::error, "rank " + std::to_string(lane.dialer) + " has opened " +
                             std::to_string(kMostUnclaimed) +
                             " TCP connections that nobody here has asked for; no more are kept");
  else
    unclaimed_.insert_or_assign(lane, std::move(socket));
}

void TcpDoor::arrived(TcpArrival& arrival) {
  arrival.here.store(true, std::memory_order_release);  // partner: TcpChannel::connected
  ring(news_.get());
}

void TcpDoor::note_stranger(const std::string& why) {
  if (now() < next_note_) return;
  next_note_ = now() + kBetweenNotes;
  log(LogLevel::info, "a TCP connection to this rank was dropped: " + why);
}

// ---- whom we call ----

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

void TcpDoor::begin(Dial dial) {
  const std::vector<std::byte> shown = segment_->address_of(dial.lane.listener);
  if (shown.empty()) {  // not there yet
    try_again(std::move(dial), "");
    return;
  }
  const auto address = TcpAddress::from(shown);
  if (!address) {
    try_again(std::move(dial), "what it has shown is no address");
    return;
  }
  Fd socket = begin_to_connect(*address);
  if (!socket && errno == EMFILE) {
    give_up(dial, errno_error("opening a TCP socket"));
    return;
  }
  if (!socket) {
    try_again(std::move(dial), address->text() + ": " + std::strerror(errno));
    return;
  }
  const TcpLane lane = dial.lane;
  add({TcpTalk(std::move(socket), TcpHandshake::dial(lane, segment_->secret())), std::move(dial),
       Deadline::never()});
}

void TcpDoor::give_up(const Dial& dial, const Error& error) {
  const auto arrival = dial.arrival.lock();
  if (!arrival) return;
  arrival->error = error;
  arrived(*arrival);
}

/// An empty `why`: it is only early, and may be so for ever.
void TcpDoor::try_again(Dial dial, const std::string& why) {
  const TimePoint when = now();
  if (!why.empty() && dial.give_up.at == TimePoint::max())
    dial.give_up = Deadline{when + kDialPatience};
  if (dial.give_up.passed(when)) {
    give_up(dial, unreachable(dial.lane, why));
    return;
  }
  dial.pause = std::clamp<Duration>(dial.pause * 2, kFirstPause, kLongestPause);
  dial.next = when + dial.pause;
  dials_.push_back(std::move(dial));
}

}  // namespace farandole
