// Estimates of how far a host's clock is ahead of rank 0's, with simulated clocks.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "control/clock_log.h"

using namespace farandole;

namespace {

/// A round trip by a clock that is `ahead` of the peer's. `there` and `back`: travel times in ns.
RoundTrip trip(int64_t sent, int64_t ahead, int64_t there, int64_t back, int64_t thinking = 700) {
  const int64_t arrived = sent - ahead + there;
  return {sent, arrived, arrived + thinking, arrived + thinking + back + ahead};
}

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

}  // namespace

TEST(clock_readings_are_right_within_what_they_say) {
  constexpr uint32_t kSeed = 5;
  std::mt19937 random(kSeed);
  for (int round = 0; round < 2000; ++round) {
    const testing::Note note("seed ", kSeed, ", round ", round);
    const int64_t ahead = static_cast<int64_t>(random()) * 1'000'003 - 2'000'000'000'000'000;
    const auto there = static_cast<int64_t>(random() % 1'000'000);
    const auto back = static_cast<int64_t>(random() % 1'000'000);
    const ClockReading reading = reading_of(trip(5'000'000, ahead, there, back));
    CHECK(std::abs(reading.ahead - ahead) <= reading.within);
    CHECK(reading.within <= (there + back) / 2 + 1);
  }
  CHECK_EQUAL(reading_of(trip(1000, 42, 300, 300)).ahead, 42);
}

TEST(clock_log_takes_the_quickest_of_a_few_round_trips) {
  ClockLog log;
  for (int i = 0; i < ClockLog::kRoundTrips; ++i) {
    CHECK(log.is_new());
    log.add(trip(1000 * i, -77, i == 3 ? 50 : 9000, i == 3 ? 50 : 100));
  }
  const ClockReading reading = log.last().value_or(ClockReading{});
  CHECK_EQUAL(reading.ahead, -77);
  CHECK_EQUAL(reading.within, 51);
  log.add(trip(100'000, 1'000'000, 1, 1));  // a single round trip gives no reading
  const ClockReading again = log.last().value_or(ClockReading{});
  CHECK_EQUAL(again.at, reading.at);
}

TEST(clock_log_writes_readings_behind_a_title) {
  char folder[] = "/tmp/farandole-clock-XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  const std::string path = std::string(folder) + "/rank-1.clock";
  ClockLog log;
  const auto read_once = [&](int64_t at) {
    for (int i = 0; i < ClockLog::kRoundTrips; ++i) log.add(trip(at, 5, 10, 10));
  };
  read_once(0);
  log.follow(path, "title");
  read_once(1000);
  log.follow("", "");
  read_once(2000);
  log.follow(path, "title");
  const auto lines = lines_of(path);
  CHECK_EQUAL(lines.size(), 4U);
  CHECK_EQUAL(lines[0], "title");
  CHECK_EQUAL(lines[1], "[360,5,11]");
  CHECK_EQUAL(lines[2], "[1360,5,11]");
  CHECK_EQUAL(lines[3], "[2360,5,11]");
  ::unlink(path.c_str());
  ::rmdir(folder);
}
