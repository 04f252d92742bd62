#include "check.h"
#include "testing/sim_world.h"

using namespace farandole;

TEST(engines_of_simulated_worlds_keep_every_promise) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const testing::Note note("seed ", seed);
    const SimReport report = simulate(seed, 20, 1 + static_cast<int>(seed % 6));
    CHECK_EQUAL(report.complaint, "");
  }
}
