// Rank 0 listens; the others dial it, say who they are (Hello with doorbell and process
// descriptor) and receive either everybody's descriptors (Welcome) or the reason for refusal.
#include "control/rendezvous.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/fixed_text.h"
#include "base/log.h"
#include "control/foreign_access.h"
#include "control/local_socket.h"

namespace farandole {
namespace {

constexpr uint32_t kProtocol = 2;
constexpr auto kGrace = std::chrono::seconds(2);

struct Hello {
  uint32_t protocol;
  int32_t rank, size;
  int32_t pid;
  char version[32];
  char agree[256];
  uint64_t cpus[16];
};

struct Answer {
  uint32_t accepted;  // else `text` says why not
  int32_t code;
  char text[kMostHandedOut + 1];  // accepted: what rank 0 hands out
};

struct Member {  // one row of the Welcome, by rank
  int32_t pid;
  uint64_t cpus[16];
};

void pack_cpus(const CpuSet& set, uint64_t (&words)[16]) {
  for (size_t i = 0; i < set.size(); ++i)
    if (set[i]) words[i / 64] |= uint64_t{1} << (i % 64);
}

CpuSet unpack_cpus(const uint64_t (&words)[16]) {
  CpuSet set;
  for (size_t i = 0; i < set.size(); ++i) set[i] = (words[i / 64] >> (i % 64)) & 1;
  return set;
}

// ---- rank 0 ----

struct Guest {
  Fd socket;
  Hello hello{};
  Fd doorbell;
  Fd process;
};

Fd own_process() {
  const auto fd = ::syscall(SYS_pidfd_open, ::getpid(), 0);
  return Fd(static_cast<int>(checked(fd, "pidfd_open")));
}

Hello hello_from(const Invitation& me) {
  Hello h{};
  h.protocol = kProtocol;
  h.rank = me.rank;
  h.size = me.size;
  h.pid = ::getpid();
  copy_cut(FARANDOLE_VERSION, h.version);
  copy_cut(me.agree, h.agree);
  pack_cpus(usable_cpus(), h.cpus);
  return h;
}

std::string who(const Hello& h) {
  return "rank " + std::to_string(h.rank) + " of " + std::to_string(h.size) + " (pid " +
         std::to_string(h.pid) + ")";
}

std::optional<Error> objection(const Hello& host, const Hello& guest,
                               const std::vector<Guest>& seats) {
  if (guest.protocol != kProtocol || std::strncmp(guest.version, host.version, 32) != 0)
    return Error(ErrorCode::version_mismatch,
                 who(guest) + " runs farandole " +
                     std::string(guest.version, ::strnlen(guest.version, 32)) + ", rank 0 runs " +
                     host.version);
  if (guest.size != host.size)
    return Error(ErrorCode::rendezvous, who(guest) + " was started for a world of " +
                                            std::to_string(guest.size) + ", " + who(host) +
                                            " for a world of " + std::to_string(host.size));
  if (guest.rank < 1 || guest.rank >= host.size)
    return Error(ErrorCode::rendezvous,
                 guest.rank == 0
                     ? "two processes are rank 0: pid " + std::to_string(host.pid) + " and pid " +
                           std::to_string(guest.pid)
                     : who(guest) + " does not exist in a world of " + std::to_string(host.size));
  const Guest& seat = seats[static_cast<size_t>(guest.rank)];
  if (seat.socket)
    return Error(ErrorCode::rendezvous, "two processes are rank " + std::to_string(guest.rank) +
                                            ": pid " + std::to_string(seat.hello.pid) +
                                            " and pid " + std::to_string(guest.pid));
  if (std::strncmp(host.agree, guest.agree, sizeof host.agree) != 0)
    return Error(ErrorCode::rendezvous, who(guest) + " has settings [" + guest.agree +
                                            "], rank 0 has [" + host.agree + "]");
  return std::nullopt;
}

void refuse(int socket, const Error& error) {
  Answer answer{};
  answer.code = static_cast<int32_t>(error.code());
  copy_cut(error.verdict(), answer.text);
  send_message(socket, &answer, sizeof answer);
}

Error missing(const std::vector<Guest>& seats) {
  std::vector<int> absent;
  for (size_t r = 1; r < seats.size(); ++r)
    if (!seats[r].socket) absent.push_back(static_cast<int>(r));
  Context where;
  where.values = {{"missing", absent}};
  return Error(ErrorCode::rendezvous,
               std::to_string(seats.size() - absent.size()) + " of " +
                   std::to_string(seats.size()) +
                   " ranks arrived; missing: " + describe_ranks(absent),
               where, "look at the logs of the missing ranks, or raise FARANDOLE_START_TIMEOUT");
}

Fd listen_for(const std::string& job) {
  const LocalAddress address(job);
  Fd listener = make_local_socket();
  if (::bind(listener.get(), address.get(), address.length) != 0)
    throw Error(
        ErrorCode::rendezvous,
        "another rank 0 of the job '" + job + "' is already there (" + std::strerror(errno) + ")",
        {}, "give this job another MASTER_PORT, or end the other one");
  checked(::listen(listener.get(), 512), "listen");
  return listener;
}

/// Rank 0 at its door, until every seat is taken. Whoever has come in is asked for its Hello among
/// all others, so that nobody who stays silent holds them up.
class Reception {
 public:
  Reception(const Invitation& me, const Hello& mine, Deadline deadline)
      : interrupted_(me.interrupted),
        mine_(mine),
        deadline_(deadline),
        listener_(listen_for(me.job)),
        seats_(static_cast<size_t>(me.size)) {}

  /// By rank; that of rank 0 is empty.
  std::vector<Guest> seat_all() && {
    while (taken_ < seats_.size()) wait_and_look();
    return std::move(seats_);
  }

 private:
  struct Arrival {
    Fd socket;
    TimePoint until;  // then it will not say hello any more
  };
  static constexpr auto kPolite = std::chrono::seconds(5);

  void wait_and_look() {
    std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
    for (const Guest& g : seats_) fds.push_back({g.socket ? g.socket.get() : -1, POLLIN, 0});
    for (const Arrival& a : arrivals_) fds.push_back({a.socket.get(), POLLIN, 0});
    const Deadline next =
        arrivals_.empty() ? deadline_ : Deadline{std::min(deadline_.at, arrivals_.front().until)};
    readable(fds, next, interrupted_);
    for (size_t r = 0; r < seats_.size(); ++r)
      if (fds[r + 1].revents != 0) refuse_because_of_leaving(seats_[r].hello);
    std::vector<Arrival> still;
    for (size_t i = 0; i < arrivals_.size(); ++i) {
      if (fds[1 + seats_.size() + i].revents != 0)
        hear(std::move(arrivals_[i].socket));
      else if (now() < arrivals_[i].until)
        still.push_back(std::move(arrivals_[i]));
    }
    arrivals_ = std::move(still);
    if (fds[0].revents != 0) let_in();
    if (taken_ < seats_.size() && deadline_.passed(now())) refuse_all(-1, missing(seats_));
  }

  void let_in() {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket || !same_user(socket.get())) return;  // a stranger is dropped silently
    arrivals_.push_back({std::move(socket), now() + kPolite});
  }

  void hear(Fd socket) {
    Hello hello{};
    std::vector<Fd> fds;
    if (!receive_message(socket.get(), &hello, sizeof hello, &fds) || fds.size() != 2) return;
    hello.version[sizeof hello.version - 1] = hello.agree[sizeof hello.agree - 1] = 0;
    if (const auto why = objection(mine_, hello, seats_)) refuse_all(socket.get(), *why);
    seats_[static_cast<size_t>(hello.rank)] = {std::move(socket), hello, std::move(fds[0]),
                                               std::move(fds[1])};
    ++taken_;
  }

  /// A guest that leaves again (its socket ends) ends the meeting.
  [[noreturn]] void refuse_because_of_leaving(const Hello& guest) {
    Context where;
    where.rank = guest.rank;
    where.pid = guest.pid;
    refuse_all(-1, Error(ErrorCode::rendezvous, who(guest) + " left while the ranks met",
                         std::move(where), "look at that rank's log"));
  }

  [[noreturn]] void refuse_all(int extra, const Error& error) {
    listener_ = Fd();  // who is refused may dial again at once: not this meeting
    for (const Guest& g : seats_)
      if (g.socket) refuse(g.socket.get(), error);
    if (extra >= 0) refuse(extra, error);
    throw error;
  }

  const std::function<void()>& interrupted_;
  const Hello& mine_;
  const Deadline deadline_;
  Fd listener_;
  std::vector<Guest> seats_;
  std::vector<Arrival> arrivals_;  // in the order they came
  size_t taken_ = 1;               // rank 0's own is never empty
};

void send_welcome(const std::vector<Guest>& seats, const Segment& segment,
                  const std::string& hand_out) {
  std::vector<Member> members;
  std::vector<int> fds;
  for (const Guest& g : seats) {
    Member m{};
    m.pid = g.hello.pid;
    std::memcpy(m.cpus, g.hello.cpus, sizeof m.cpus);
    members.push_back(m);
    fds.push_back(g.doorbell.get());
    fds.push_back(g.process.get());
  }
  Answer yes{1, 0, {}};
  copy_cut(hand_out, yes.text);
  const int memory = segment.fd();
  for (size_t r = 1; r < seats.size(); ++r) {
    const int to = seats[r].socket.get();
    bool sent = send_message(to, &yes, sizeof yes, {&memory, 1}) &&
                send_message(to, members.data(), members.size() * sizeof(Member));
    for (size_t i = 0; sent && i < fds.size(); i += kMostDescriptors) {
      const size_t n = std::min(kMostDescriptors, fds.size() - i);
      sent = send_message(to, &n, sizeof n, {fds.data() + i, n});
    }
    if (!sent) log(LogLevel::warning, "rank " + std::to_string(r) + " left while ranks met");
  }
}

Host assemble(int rank, std::shared_ptr<Segment> segment, const std::vector<Member>& members,
              std::vector<Fd> fds, std::string handed_out) {
  Host host{rank, {}, std::move(segment), {}, std::move(handed_out)};
  for (size_t r = 0; r < members.size(); ++r)
    host.peers.push_back({{static_cast<int>(r), "local", members[r].pid, {}},
                          unpack_cpus(members[r].cpus),
                          std::move(fds[2 * r]),
                          std::move(fds[2 * r + 1])});
  host.segment->show_state(rank, RankState::present);
  return host;
}

Host be_host(const Invitation& me, Deadline deadline) {
  const Hello mine = hello_from(me);
  std::vector<Guest> seats = Reception(me, mine, deadline).seat_all();
  seats[0].hello = mine;
  seats[0].doorbell = make_event_fd();
  seats[0].process = own_process();
  auto segment = Segment::create(me.size, me.arena_bytes);
  // All ranks are present from the moment the segment is theirs; absent means not yet mapped.
  send_welcome(seats, *segment, me.hand_out);
  std::vector<Member> members;
  std::vector<Fd> fds;
  for (Guest& g : seats) {
    Member m{};
    m.pid = g.hello.pid;
    std::memcpy(m.cpus, g.hello.cpus, sizeof m.cpus);
    members.push_back(m);
    fds.push_back(std::move(g.doorbell));
    fds.push_back(std::move(g.process));
  }
  return assemble(0, std::move(segment), members, std::move(fds), {});
}

// ---- the others ----

Fd dial(const Invitation& me, Deadline deadline) {
  const LocalAddress address(me.job);
  auto pause = std::chrono::microseconds(200);
  for (;;) {
    Fd socket = make_local_socket();
    if (::connect(socket.get(), address.get(), address.length) == 0) {
      if (!same_user(socket.get()))
        throw Error(ErrorCode::authentication, "rank 0 of this job runs as another user");
      return socket;
    }
    if (deadline.passed(now()))
      throw Error(
          ErrorCode::rendezvous,
          "rank " + std::to_string(me.rank) + " found no rank 0 of the job '" + me.job + "'", {},
          "look at rank 0's log; check that all ranks share MASTER_ADDR, MASTER_PORT "
          "and WORLD_SIZE");
    me.interrupted();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20000));
  }
}

Error lost_host() {
  return Error(ErrorCode::rendezvous, "rank 0 went away while the ranks met", {},
               "look at rank 0's log");
}

Host be_guest(const Invitation& me, Deadline deadline) {
  const Fd socket = dial(me, deadline);
  const Hello mine = hello_from(me);
  const Fd doorbell = make_event_fd();
  const Fd process = own_process();
  const int given[] = {doorbell.get(), process.get()};
  if (!send_message(socket.get(), &mine, sizeof mine, given)) throw lost_host();

  Answer answer{};
  std::vector<Fd> memory;
  // Rank 0 knows who is missing and says so at its deadline, which may be a little after mine.
  const auto patience = std::min<Duration>(deadline.left(now()), std::chrono::hours(24 * 365));
  if (!readable(socket.get(), Deadline::after(patience + kGrace), me.interrupted))
    throw Error(ErrorCode::rendezvous, "not all ranks arrived before the start timeout", {},
                "look at rank 0's message for the missing ranks");
  if (!receive_message(socket.get(), &answer, sizeof answer, &memory)) throw lost_host();
  answer.text[sizeof answer.text - 1] = 0;
  if (answer.accepted == 0) {
    throw Error(answer.code == static_cast<int>(ErrorCode::version_mismatch)
                    ? ErrorCode::version_mismatch
                    : ErrorCode::rendezvous,
                answer.text);
  }
  std::vector<Member> members(static_cast<size_t>(me.size));
  if (memory.size() != 1 ||
      !receive_message(socket.get(), members.data(), members.size() * sizeof(Member)))
    throw lost_host();
  std::vector<Fd> fds;
  while (fds.size() < 2 * members.size()) {
    size_t n = 0;
    std::vector<Fd> some;
    if (!receive_message(socket.get(), &n, sizeof n, &some) || some.empty()) throw lost_host();
    for (Fd& fd : some) fds.push_back(std::move(fd));
  }
  return assemble(me.rank, Segment::attach(std::move(memory[0])), members, std::move(fds),
                  answer.text);
}

}  // namespace

Host meet(const Invitation& invitation, Deadline deadline) {
  if (invitation.size < 1 || invitation.rank < 0 || invitation.rank >= invitation.size)
    throw Error(ErrorCode::rendezvous, "rank " + std::to_string(invitation.rank) +
                                           " does not exist in a world of " +
                                           std::to_string(invitation.size));
  if (invitation.hand_out.size() > kMostHandedOut)
    throw Error(ErrorCode::internal, "rank 0 hands out more than fits");
  Host host = invitation.size == 1   ? host_alone(invitation.arena_bytes)
              : invitation.rank == 0 ? be_host(invitation, deadline)
                                     : be_guest(invitation, deadline);
  if (invitation.rank == 0) host.handed_out = invitation.hand_out;
  try {
    host.foreign =
        agree_on_foreign_access(host, invitation.foreign, deadline, invitation.interrupted);
  } catch (...) {  // nobody shall wait for this rank
    host.segment->show_state(host.rank, RankState::gone);
    throw;
  }
  return host;
}

}  // namespace farandole
