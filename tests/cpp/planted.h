// Faults that a sanitizer must notice: ctest plants each under its sanitizer (CMakeLists.txt), and
// fails if nothing is noticed.
#pragma once

#include <cstdio>
#include <limits>
#include <string_view>
#include <thread>
#include <vector>

namespace testing {

// Volatile, so that no compiler sees the faults before they happen.
inline volatile int one = 1;

inline void read_past_the_end() {
  const std::vector<int> numbers(1);
  std::printf("%d\n", numbers.data()[one]);
}

inline void overflow() { std::printf("%d\n", std::numeric_limits<int>::max() + one); }

inline void race() {
  int shared = 0;
  volatile int* const counter = &shared;
  std::thread other([counter] { *counter = *counter + 1; });
  *counter = *counter + 1;
  other.join();
}

/// Does what the name says. False if there is no such fault.
inline bool plant(std::string_view fault) {
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

}  // namespace testing
