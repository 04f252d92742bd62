#include "control/host.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "base/error.h"
#include "control/absence.h"
#include "control/control_mesh.h"
#include "control/farewell.h"

namespace farandole {

CpuSet usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  CpuSet cpus;
  for (int i = 0; i < CPU_SETSIZE; ++i) cpus[static_cast<size_t>(i)] = CPU_ISSET(i, &set) != 0;
  return cpus;
}

Fd own_process() {
  const auto fd = ::syscall(SYS_pidfd_open, ::getpid(), 0);
  return Fd(static_cast<int>(checked(fd, "pidfd_open")));
}

std::vector<Host> hosts_in_process(int size, size_t arena_bytes) {
  auto segment = Segment::create(size, arena_bytes);
  std::vector<Fd> doorbells;
  for (int r = 0; r < size; ++r) doorbells.push_back(make_event_fd());
  std::vector<Host> hosts;
  for (int r = 0; r < size; ++r) {
    Host host{r, {}, segment, {.allowed = true, .preferred = true}};
    for (int p = 0; p < size; ++p)
      host.peers.push_back(
          {{p, "local", ::getpid(), {}},
           usable_cpus(),
           Fd(checked(::fcntl(doorbells[static_cast<size_t>(p)].get(), F_DUPFD_CLOEXEC, 0), "dup")),
           Fd()});
    segment->show_state(r, RankState::present);
    hosts.push_back(std::move(host));
  }
  return hosts;
}

bool Host::are_here(const std::vector<int>& world_ranks) const {
  return std::ranges::all_of(world_ranks, [&](int r) { return is_here(r); });
}

bool Host::share_one(int world_rank, int other) const {
  const auto name = [&](int r) { return peers[static_cast<size_t>(r)].info.host; };
  return name(world_rank) == name(other);
}

std::vector<int> Host::ranks_here() const {
  std::vector<int> ranks;
  for (const HostPeer& peer : peers)
    if (peer.here) ranks.push_back(peer.info.rank);
  return ranks;
}

std::string Host::name_of(int world_rank) const {
  const HostPeer& peer = peers[static_cast<size_t>(world_rank)];
  return "rank " + std::to_string(world_rank) + " (pid " + std::to_string(peer.info.pid) +
         (mesh == nullptr ? "" : " on " + peer.info.host) + ")";
}

std::string Host::state_of(int world_rank) const {
  if (is_here(world_rank)) return process_state(peers[static_cast<size_t>(world_rank)].info.pid);
  return is_stopped(world_rank) ? "stopped" : "on another host";
}

std::string Host::name_and_state_of(int world_rank) const {
  std::string name = name_of(world_rank);
  if (!is_here(world_rank) && !is_stopped(world_rank)) return name;
  return name.substr(0, name.size() - 1) + ", " + state_of(world_rank) + ")";
}

bool Host::stands_still(int world_rank) const {
  if (!is_here(world_rank)) return is_stopped(world_rank);
  return farandole::stands_still(peers[static_cast<size_t>(world_rank)].info.pid);
}

bool Host::is_stopped(int world_rank) const {
  if (!is_here(world_rank)) return mesh->is_stopped(world_rank);
  return farandole::is_stopped(peers[static_cast<size_t>(world_rank)].info.pid);
}

Host host_alone(size_t arena_bytes) { return std::move(hosts_in_process(1, arena_bytes)[0]); }

Context Host::about(int world_rank, Context where) const {
  const PeerInfo& peer = peers[static_cast<size_t>(world_rank)].info;
  where.rank = world_rank;
  where.pid = peer.pid;
  where.host = peer.host;
  return where;
}

std::optional<Error> absence_of(const Host& host, int rank, const std::string& when) {
  const HostPeer& peer = host.peers[static_cast<size_t>(rank)];
  pollfd process{peer.process ? peer.process.get() : -1, POLLIN, 0};
  const bool dead = peer.here ? ::poll(&process, 1, 0) > 0 : host.mesh->has_lost(rank);
  const bool left = host.segment->state_of(rank) >= RankState::leaving &&
                    (rank == host.rank || !is_ending(*host.segment, rank));
  if (!dead && !left) return std::nullopt;
  Context where;
  where.rank = rank;
  where.pid = peer.info.pid;
  const std::string name = host.name_of(rank);
  if (left) {
    if (auto reason = farewell_of(*host.segment, rank, where)) return reason;
    return Error(ErrorCode::early_exit, name + " left " + when, std::move(where));
  }
  if (auto loss = error_of_loss(host, rank, when, where)) return loss;
  return Error(ErrorCode::peer_lost, name + " died " + when, std::move(where));
}

namespace {
/// The letter of /proc; 0 when there is no such process.
char state_letter(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');  // of a process that ends meanwhile: nothing, and no exception
  const size_t end = text.rfind(')');  // the name before it may hold anything
  return end == std::string::npos || end + 2 >= text.size() ? '\0' : text[end + 2];
}
}  // namespace

std::string process_state(pid_t pid) {
  switch (state_letter(pid)) {
    case 0:
    case 'R':
      return "running";
    case 'S':
      return "sleeping";
    case 'D':
      return "in uninterruptible sleep";
    case 'T':
      return "stopped";
    case 't':
      return "stopped by a debugger";
    case 'Z':
      return "dead";
    default:
      return "unknown";
  }
}

bool stands_still(pid_t pid) {
  const char letter = state_letter(pid);
  return letter == 'T' || letter == 't' || letter == 'D';
}

bool is_stopped(pid_t pid) {
  const char letter = state_letter(pid);
  return letter == 'T' || letter == 't';
}

}  // namespace farandole
