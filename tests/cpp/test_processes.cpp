// Ranks that are processes, as a user's are: with one shared segment and each other's memory.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include <string>
#include <vector>

#include "checked_collective.h"
#include "control/join.h"

using namespace farandole;
using testing::CheckedCollective;
using testing::patience;

namespace {

/// Resources that the processes of one host inherit when they are forked.
struct Meeting {
  explicit Meeting(int size)
      : memory(Segment::create(size, 16 << 20)),
        pids(static_cast<std::atomic<pid_t>*>(
            ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    for (int r = 0; r < size; ++r) doorbells.push_back(make_event_fd());
  }
  ~Meeting() { ::munmap(pids, 4096); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  Roll roll_of(int rank) {
    Roll roll{.rank = rank, .memory = memory};
    pids[rank].store(::getpid());
    for (int r = 0; r < memory->ranks(); ++r) {
      while (pids[r].load() == 0) std::this_thread::yield();
      const auto process = ::syscall(SYS_pidfd_open, pids[r].load(), 0);
      roll.peers.push_back({{r, "local", pids[r].load(), {}},
                            usable_cpus(),
                            copy_of(doorbells[static_cast<size_t>(r)]),
                            Fd(static_cast<int>(checked(process, "pidfd_open")))});
    }
    return roll;
  }

  std::shared_ptr<Segment> memory;
  std::atomic<pid_t>* pids;  // by rank, in memory that all share
  std::vector<Fd> doorbells;
};

void compute_everything(Meeting& meeting, int rank) {
  const int size = meeting.memory->ranks();
  Host host = join(meeting.roll_of(rank), ForeignWish::if_faster, patience(), [] {});
  const auto group = Group::world(
      std::make_shared<Engine>(std::move(host), testing::engine_options(ProgressMode::automatic)),
      {}, patience());
  int salt = 0;
  for (const Collective kind : testing::kDataCollectives)
    for (const size_t count : {0U, 1U, 250U, 250'007U, 1'000'000U})
      for (const char* algorithm : {"", "halving_doubling"}) {
        if (*algorithm != '\0' && kind != Collective::all_reduce) continue;
        CheckedCollective work(group, kind, count, salt % size, salt);
        work.submit(*group, algorithm);
        work.check();
        ++salt;
      }
}

/// Forks a rank, which exits with 0 if all its checks hold.
pid_t forked_rank(Meeting& meeting, int rank) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    compute_everything(meeting, rank);
  } catch (const std::exception& error) {
    testing::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
  }
  ::_exit(testing::failures == 0 ? 0 : 1);
}

}  // namespace

TEST(processes_as_ranks_compute_every_collective) {
  for (const int size : {2, 3}) {
    const testing::Note note("size ", size);
    Meeting meeting(size);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < size; ++rank) ranks.push_back(forked_rank(meeting, rank));
    for (const pid_t rank : ranks) {
      int status = -1;
      ::waitpid(rank, &status, 0);
      CHECK_EQUAL(status, 0);
    }
  }
}
