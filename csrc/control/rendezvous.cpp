// Rank 0 listens; the others dial it, say who they are (Hello with doorbell and process
// descriptor) and receive either everybody's descriptors (Welcome) or the reason for refusal.
#include "control/rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/fixed_text.h"
#include "base/log.h"
#include "control/foreign_access.h"

namespace farandole {
namespace {

constexpr uint32_t kProtocol = 2;
constexpr auto kGrace = std::chrono::seconds(2);
constexpr size_t kMostDescriptors = 250;  // the kernel takes at most 253 in one message

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

// ---- sockets ----

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
};

Address address_of(const std::string& job) {
  // A hash keeps long names within the 108 bytes an address has; the uid is part of the name.
  uint64_t h = 0xcbf29ce484222325;
  for (const char c : job) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  const std::string text =
      "farandole-" + std::to_string(::getuid()) + "-" + std::to_string(h) + "-" + job.substr(0, 48);
  Address a;
  a.name.sun_family = AF_UNIX;
  std::memcpy(a.name.sun_path + 1, text.data(), text.size());  // leading 0: abstract
  a.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return a;
}

Fd make_socket() {
  return Fd(checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "socket"));
}

bool same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

/// True when one of `fds` becomes readable before the deadline; see their `revents`.
bool readable(std::span<pollfd> fds, Deadline deadline, const std::function<void()>& interrupted) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left(now()));
    const int timeout = static_cast<int>(std::min<int64_t>(left.count(), 100));
    const int n = ::poll(fds.data(), fds.size(), timeout);
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) throw_errno("poll");
    interrupted();
    if (deadline.passed(now())) return false;
  }
}

bool readable(int fd, Deadline deadline, const std::function<void()>& interrupted) {
  pollfd p{fd, POLLIN, 0};
  return readable({&p, 1}, deadline, interrupted);
}

bool send_message(int fd, const void* data, size_t bytes, std::span<const int> fds = {}) {
  iovec body{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(fd, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

/// One message of exactly `bytes`, with its descriptors; false when the peer is gone or sent
/// something else.
bool receive_message(int fd, void* data, size_t bytes, std::vector<Fd>* fds = nullptr) {
  iovec body{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const auto got = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return false;
  std::vector<Fd> taken;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(c) + i * sizeof(int), sizeof descriptor);
      taken.emplace_back(descriptor);
    }
  }
  const bool whole = got == static_cast<ssize_t>(bytes) && (message.msg_flags & MSG_TRUNC) == 0;
  if (whole && fds != nullptr) *fds = std::move(taken);
  return whole;
}

// ---- the two sides ----

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

[[noreturn]] void refuse_all(const std::vector<Guest>& seats, int extra, const Error& error) {
  for (const Guest& g : seats)
    if (g.socket) refuse(g.socket.get(), error);
  if (extra >= 0) refuse(extra, error);
  throw error;
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

Fd listen_at(const Address& address, const std::string& job) {
  Fd listener = make_socket();
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address.name), address.length) != 0)
    throw Error(
        ErrorCode::rendezvous,
        "another rank 0 of the job '" + job + "' is already there (" + std::strerror(errno) + ")",
        {}, "give this job another MASTER_PORT, or end the other one");
  checked(::listen(listener.get(), 512), "listen");
  return listener;
}

/// Waits for the next guest. A guest that leaves again (its socket ends) ends the meeting.
void wait_at_door(int listener, const std::vector<Guest>& seats, Deadline deadline,
                  const std::function<void()>& interrupted) {
  std::vector<pollfd> fds{{listener, POLLIN, 0}};
  for (const Guest& g : seats) fds.push_back({g.socket ? g.socket.get() : -1, POLLIN, 0});
  if (!readable(fds, deadline, interrupted)) refuse_all(seats, -1, missing(seats));
  for (size_t r = 0; r < seats.size(); ++r) {
    if (fds[r + 1].revents == 0) continue;
    Context where;
    where.rank = static_cast<int>(r);
    where.pid = seats[r].hello.pid;
    refuse_all(seats, -1,
               Error(ErrorCode::rendezvous, who(seats[r].hello) + " left while the ranks met",
                     std::move(where), "look at that rank's log"));
  }
}

/// Takes guests in until every seat is filled.
std::vector<Guest> receive_guests(int listener, const Hello& mine, Deadline deadline,
                                  const std::function<void()>& interrupted) {
  std::vector<Guest> seats(static_cast<size_t>(mine.size));
  for (int left = mine.size - 1; left > 0;) {
    wait_at_door(listener, seats, deadline, interrupted);
    Fd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket || !same_user(socket.get())) continue;  // a stranger is dropped silently
    Hello hello{};
    std::vector<Fd> fds;
    // A guest says hello at once or not at all; nobody may hold up the others.
    const Deadline polite{std::min(deadline.at, now() + std::chrono::seconds(5))};
    if (!readable(socket.get(), polite, interrupted) ||
        !receive_message(socket.get(), &hello, sizeof hello, &fds) || fds.size() != 2)
      continue;
    hello.version[sizeof hello.version - 1] = hello.agree[sizeof hello.agree - 1] = 0;
    if (const auto why = objection(mine, hello, seats)) refuse_all(seats, socket.get(), *why);
    seats[static_cast<size_t>(hello.rank)] = {std::move(socket), hello, std::move(fds[0]),
                                              std::move(fds[1])};
    --left;
  }
  return seats;
}

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
  host.segment->page(rank).state.value.store(static_cast<uint64_t>(RankState::present),
                                             std::memory_order_release);
  return host;
}

Host be_host(const Invitation& me, Deadline deadline) {
  const Fd listener = listen_at(address_of(me.job), me.job);
  const Hello mine = hello_from(me);
  std::vector<Guest> seats = receive_guests(listener.get(), mine, deadline, me.interrupted);
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

Fd dial(const Invitation& me, Deadline deadline) {
  const Address address = address_of(me.job);
  auto pause = std::chrono::microseconds(200);
  for (;;) {
    Fd socket = make_socket();
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.name), address.length) ==
        0) {
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
    host.segment->page(host.rank).state.value.store(static_cast<uint64_t>(RankState::left));
    throw;
  }
  return host;
}

}  // namespace farandole
