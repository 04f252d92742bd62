#include "planted.h"

#include <cstdio>
#include <limits>
#include <thread>
#include <vector>

namespace {

// Volatile, so that no compiler sees the faults before they happen.
volatile int one = 1;

void read_past_the_end() {
  const std::vector<int> numbers(1);
  std::printf("%d\n", numbers.data()[one]);
}

void overflow() { std::printf("%d\n", std::numeric_limits<int>::max() + one); }

void race() {
  int shared = 0;
  volatile int* const counter = &shared;
  std::thread other([counter] { *counter = *counter + 1; });
  *counter = *counter + 1;
  other.join();
}

}  // namespace

bool testing::plant(std::string_view fault) {
  if (fault == "read_past_the_end") {
    read_past_the_end();
  } else if (fault == "overflow") {
    overflow();
  } else if (fault == "race") {
    race();
  } else {
    return false;
  }
  return true;
}
