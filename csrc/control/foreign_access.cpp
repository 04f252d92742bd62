#include "control/foreign_access.h"

#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "base/error.h"
#include "transport/foreign_memory.h"

namespace farandole {
namespace {

enum Step : uint64_t { nothing, shown, allowed, refused };

// Numbers that ranks show to each other. By rank, since ranks may be threads of one process; never
// freed, since a rank that comes late writes to it even when this one has given up.
std::array<std::atomic<uint64_t>, kMostRanks> numbers;

// A copy by address is timed against one out of and one into shared memory, which it replaces. Up
// to half as slow again it still wins: push waits twice in all, staged twice a block. Measured
// 230-350 % where push then took 1.8 times as long as staged (64 KiB to 4 MiB, AMD Zen 3 without
// fast string copies in the kernel); the other side of the mark is not measured.
constexpr size_t kCopied = 32 << 10;
constexpr uint32_t kDemanded = 0, kMostPercent = 150, kMost = 10'000;

ForeignSample& sample_of(const Host& host, int rank) { return host.segment->page(rank).foreign; }

uint64_t step_of(const Host& host, int rank) {
  return sample_of(host, rank).step.load(std::memory_order_acquire);  // partner: take_step
}
void take_step(const Host& host, Step step) {
  sample_of(host, host.rank).step.store(step, std::memory_order_release);
}

void wait_for_all(const Host& host, Step step, Deadline deadline,
                  const std::function<void()>& interrupted) {
  for (const int r : host.ranks_here()) {
    for (int looks = 1;; ++looks) {
      std::optional<Error> absence;
      if (looks >= 1000) absence = absence_of(host, r, "while the ranks met");
      if (step_of(host, r) >= step) break;
      if (absence) throw Error(*absence);
      if (deadline.passed(now()))
        throw Error(ErrorCode::rendezvous,
                    "rank " + std::to_string(r) + " did not come to the end of the meeting");
      if (looks < 1000) {
        std::this_thread::yield();
        continue;
      }
      if (looks % 1000 == 0) interrupted();  // ten times a second
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

void show(const Host& host, const std::vector<std::byte>& own_bytes) {
  std::atomic<uint64_t>& number = numbers[static_cast<size_t>(host.rank)];
  ForeignSample& sample = sample_of(host, host.rank);
  if (::getrandom(&sample.number, sizeof sample.number, 0) != sizeof sample.number)
    throw_errno("getrandom");
  number.store(sample.number, std::memory_order_relaxed);  // released by take_step
  sample.number_at = reinterpret_cast<uint64_t>(&number);
  sample.bytes_at = reinterpret_cast<uint64_t>(own_bytes.data());
  std::memset(sample.bytes, 1, sizeof sample.bytes);
  take_step(host, shown);
}

/// 0, or the errno for which this rank cannot reach the memory of rank r.
int reach(const Host& host, int r) {
  const ForeignSample& theirs = sample_of(host, r);
  const pid_t process = host.peers[static_cast<size_t>(r)].info.pid;
  uint64_t found = 0;
  auto* here = reinterpret_cast<std::byte*>(&found);
  if (const int error = read_foreign(process, here, theirs.number_at, sizeof found)) return error;
  if (found != theirs.number) return ESRCH;  // of another namespace, where its pid is a stranger's
  return write_foreign(process, theirs.number_at, here, sizeof found);
}

/// Times copies of data that the next rank has just written, as in a collective.
uint32_t percent_of_shared(const Host& host) {
  const std::vector<int> ranks = host.ranks_here();
  const auto after = std::ranges::upper_bound(ranks, host.rank);
  const int next = after == ranks.end() ? ranks.front() : *after;
  const pid_t process = host.peers[static_cast<size_t>(next)].info.pid;
  const ForeignSample& theirs = sample_of(host, next);
  std::vector<std::byte> copy(kCopied), staging(kCopied);
  Duration by_address = Duration::max(), shared = Duration::max();
  for (size_t at = 0; at < sizeof theirs.bytes; at += kCopied) {
    const auto touched = static_cast<const volatile std::byte*>(theirs.bytes + at);
    for (size_t page = 0; page < kCopied; page += 4096) (void)touched[page];  // not to be timed
    const TimePoint begin = now();
    if (read_foreign(process, copy.data(), theirs.bytes_at + at, kCopied) != 0) return kMost;
    const TimePoint middle = now();
    std::memcpy(copy.data(), theirs.bytes + at, kCopied);
    std::memcpy(staging.data(), copy.data(), kCopied);
    asm volatile("" : : "r"(staging.data()) : "memory");  // the copies are not to be left out
    by_address = std::min(by_address, middle - begin);
    shared = std::min<Duration>(shared, now() - middle);
  }
  const auto percent = 100 * by_address.count() / std::max<int64_t>(1, shared.count());
  return static_cast<uint32_t>(std::clamp<int64_t>(percent, kDemanded + 1, kMost));
}

Step try_all(const Host& host, ForeignWish wish) {
  ForeignSample& mine = sample_of(host, host.rank);
  mine.refused_by = host.rank;
  if (wish == ForeignWish::never) return refused;
  for (const int r : host.ranks_here()) {
    if (r == host.rank) continue;
    mine.error = reach(host, r);
    mine.refused_by = r;
    if (mine.error != 0) return refused;
  }
  mine.percent = wish == ForeignWish::always || host.ranks_here().size() == 1
                     ? kDemanded
                     : percent_of_shared(host);
  return allowed;
}

std::string why_refused(const Host& host, int rank) {
  const ForeignSample& sample = sample_of(host, rank);
  if (sample.error == 0) return "FARANDOLE_CMA=0 on rank " + std::to_string(rank);
  return "rank " + std::to_string(rank) + " cannot reach the memory of rank " +
         std::to_string(sample.refused_by) + ": " + std::strerror(sample.error);
}

/// The result of all ranks' attempts, in the same words on each.
ForeignAccess answer_of(const Host& host) {
  std::vector<uint32_t> percents;
  for (const int r : host.ranks_here()) {
    if (step_of(host, r) == refused) return {.why_not = why_refused(host, r)};
    percents.push_back(sample_of(host, r).percent);
  }
  std::sort(percents.begin(), percents.end());
  const uint32_t middle = percents[percents.size() / 2];  // more than half are no slower
  if (middle <= kMostPercent) return {true, true, "", middle == kDemanded};
  return {true, false,
          "reaching other ranks' memory takes " + std::to_string(middle) +
              " % of the time of copies through shared memory (FARANDOLE_CMA=1 does it anyway)"};
}

/// A process and its ancestors, up to the first of all.
std::vector<pid_t> line_of(pid_t process) {
  std::vector<pid_t> line;
  while (process > 0) {
    line.push_back(process);
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string text;
    std::getline(file, text, '\0');  // of a process that ends meanwhile: nothing, and no exception
    const size_t end = text.rfind(')');  // the name before it may hold anything
    if (end == std::string::npos || end + 4 >= text.size()) break;
    process = static_cast<pid_t>(std::atoi(text.c_str() + end + 4));  // ") S 123 ..."
  }
  return line;
}

/// Under Yama a process may be reached by its ancestors alone, and by one process it names and
/// that one's descendants: the nearest process above all ranks lets in the fewest others. Where
/// there is no Yama there is nothing to name.
void admit_other_ranks(const Host& host) {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  if (!(file >> scope) || scope != 1) return;
  std::vector<pid_t> processes;
  for (const HostPeer& peer : host.peers)
    if (peer.here) processes.push_back(peer.info.pid);
  if (const pid_t ancestor = nearest_common_ancestor(processes); ancestor > 0)
    ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(ancestor), 0, 0, 0);
}

}  // namespace

pid_t nearest_common_ancestor(const std::vector<pid_t>& processes) {
  if (processes.empty()) return 0;
  std::vector<pid_t> common = line_of(processes.front());
  for (const pid_t process : processes) {
    const std::vector<pid_t> line = line_of(process);
    std::erase_if(common,
                  [&](pid_t p) { return std::find(line.begin(), line.end(), p) == line.end(); });
  }
  return common.empty() ? 0 : common.front();
}

ForeignAccess agree_on_foreign_access(const Host& host, ForeignWish wish, Deadline deadline,
                                      const std::function<void()>& interrupted) {
  if (wish != ForeignWish::never) admit_other_ranks(host);
  const std::vector<std::byte> own_bytes(sizeof(ForeignSample::bytes), std::byte{1});
  show(host, own_bytes);
  wait_for_all(host, shown, deadline, interrupted);
  take_step(host, try_all(host, wish));
  wait_for_all(host, allowed, deadline, interrupted);
  return answer_of(host);
}

}  // namespace farandole
