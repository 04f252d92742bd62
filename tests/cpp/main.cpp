// Runs the tests whose names contain the argument; all without one. `--share 2/4`: the second of
// four shares of all. `--plant race`: a fault of planted.h, for a sanitizer to notice.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "check.h"
#include "planted.h"

namespace {

// The whole program, under a sanitizer on a slow machine: a test that hangs ends here.
constexpr unsigned kTimeLimitSeconds = 600;

bool passes(const testing::Test& test) {
  testing::failures = 0;
  try {
    test.body();
  } catch (const std::exception& error) {
    testing::fail(__FILE__, __LINE__, std::string("exception: ") + error.what());
  }
  return testing::failures == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--plant") == 0)
    return testing::plant(argv[2]) ? EXIT_SUCCESS : EXIT_FAILURE;
  size_t share = 1, shares = 1;
  const bool shared = argc == 3 && std::strcmp(argv[1], "--share") == 0;
  if (shared && (std::sscanf(argv[2], "%zu/%zu", &share, &shares) != 2 || shares == 0))
    return EXIT_FAILURE;
  const std::string_view filter = argc > 1 && !shared ? argv[1] : "";
  alarm(kTimeLimitSeconds);
  // Ranks that are forked start threads, which ThreadSanitizer allows only before this process has
  // any: some stay for its life (jax/completion_executor).
  std::vector<testing::Test> tests = testing::tests();
  std::stable_partition(tests.begin(), tests.end(), [](const testing::Test& test) {
    return test.name.starts_with("processes_");
  });
  int passed = 0, failed = 0;
  size_t number = 0;
  for (const testing::Test& test : tests) {
    if (test.name.find(filter) == std::string::npos || ++number % shares != share % shares)
      continue;
    std::cout << test.name << std::endl;
    if (passes(test)) {
      ++passed;
    } else {
      ++failed;
      std::cout << "  FAILED: " << test.name << std::endl;
    }
  }
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 && passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
