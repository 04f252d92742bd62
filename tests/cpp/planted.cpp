#include "planted.h"

#include <cstdio>
#include <limits>
#include <memory>
#include <thread>

namespace {

// Volatile, so that no compiler sees the faults before they happen.
volatile int one = 1;

void use_after_free() {
  auto owner = std::make_unique<int>(one);
  volatile int* const freed = owner.get();
  owner.reset();
  std::printf("%d\n", *freed);
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
  if (fault == "use_after_free") {
    use_after_free();
  } else if (fault == "overflow") {
    overflow();
  } else if (fault == "race") {
    race();
  } else {
    return false;
  }
  return true;
}
