// Whole worlds in one thread: every rank's engine is polled in an order drawn from a seed, over
// channels that misbehave, through every door that a thread could take. Operations, their order
// between streams, disagreements, failures and deaths are drawn too; what comes out is compared
// bit for bit with a reference. The same seed gives the same world again.
#pragma once

#include <cstdint>
#include <string>

namespace farandole {

struct SimReport {
  uint64_t seed = 0;
  int ranks = 0;
  std::string fate;       // "lives", "aborted" or "bereaved": what was done to the world
  uint64_t turns = 0;     // engine turns, over all ranks
  int operations = 0;     // collectives that were submitted
  int correct = 0;        // ranks' shares of them that ended with the right bits
  int refused = 0;        // that all ranks refused alike
  int failed = 0;         // that ended with their group's verdict
  std::string verdict;    // of the first group that failed
  std::string complaint;  // what was wrong; empty when all was well
};

/// Runs about `steps` collectives among `ranks` ranks, in several groups and streams at once.
SimReport simulate(uint64_t seed, int steps, int ranks);

}  // namespace farandole
