// Ranks that are processes, as a user's are: on one segment, and in each other's memory.
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "checked_collective.h"
#include "control/rendezvous.h"

using namespace farandole;
using testing::CheckedCollective;
using testing::patience;

namespace {

void compute_everything(const std::string& job, int rank, int size) {
  Host host = meet({rank, size, job, 16 << 20, "level=x"}, patience());
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

/// Its exit status is 0 where all was right.
pid_t forked_rank(const std::string& job, int rank, int size) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    compute_everything(job, rank, size);
  } catch (const std::exception& error) {
    testing::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
  }
  ::_exit(testing::failures == 0 ? 0 : 1);
}

}  // namespace

TEST(processes_as_ranks_compute_every_collective) {
  for (const int size : {2, 3}) {
    const testing::Note note("size ", size);
    const std::string job = "processes " + std::to_string(::getpid()) + " " + std::to_string(size);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < size; ++rank) ranks.push_back(forked_rank(job, rank, size));
    for (const pid_t rank : ranks) {
      int status = -1;
      ::waitpid(rank, &status, 0);
      CHECK_EQUAL(status, 0);
    }
  }
}
