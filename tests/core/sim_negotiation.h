// Ranks that submit operations by name in random orders, in one thread, from a seed: the
// negotiator without an engine.
#pragma once

#include <cstdint>
#include <string>

namespace farandole {

struct NegotiationReport {
  uint64_t seed = 0;
  int ranks = 0;
  size_t ordered = 0;     // operations, on all ranks together
  size_t refused = 0;     // because the ranks disagree
  size_t stood_in = 0;    // for ranks that have joined
  size_t forgotten = 0;   // ids taken back
  size_t stale = 0;       // offers by ids that had been taken back meanwhile
  size_t bytes = 0;       // of all messages
  std::string complaint;  // empty when all was well
};

/// `names` in each set, each submitted `times` times on every member, by at most `ids` ids.
NegotiationReport simulate_negotiation(uint64_t seed, int ranks, int names, int times, size_t ids);

}  // namespace farandole
