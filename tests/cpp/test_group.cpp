// Questions that several threads may ask of one group.
#include "engines.h"

#include <atomic>
#include <set>
#include <string>
#include <thread>

#include "base/spelling.h"

using namespace farandole;
using testing::run_groups;
using testing::Sum;

TEST(group_tells_any_thread_how_the_last_operation_went) {
  run_groups(2, ProgressMode::thread, [&](const std::shared_ptr<Group>& group) {
    std::atomic<bool> over{false};
    std::set<std::string> seen;
    std::thread onlooker([&] {
      while (!over.load()) seen.emplace(group->last_way());
    });
    for (int i = 0; i < 100; ++i) {
      Sum sum(group->rank(), 2, 10'000);
      Options options{{Collective::all_reduce}};
      options.algorithm = i % 2 == 0 ? "cico" : "ring";
      const Handle handle = group->submit(sum.buffer(), sum.buffer(), options);
      CHECK_EQUAL(testing::error_of(handle), "");
    }
    over = true;
    onlooker.join();
    seen.emplace(group->last_way());
    for (const std::string& path : seen) CHECK(path == "" || path == "cico" || path == "schedule");
    CHECK(seen.contains("schedule"));
  });
}

TEST(closest_name_is_the_one_with_the_fewest_changes) {
  const std::string_view names[] = {"ring", "direct", "halving_doubling", "doubling"};
  CHECK_EQUAL(closest("rign", names), "ring");
  CHECK_EQUAL(closest("doublin", names), "doubling");
  CHECK_EQUAL(closest("halving-doubling", names), "halving_doubling");
  CHECK_EQUAL(closest("direct", names), "direct");
  CHECK_EQUAL(closest("", names), "");
  CHECK_EQUAL(closest("bruck", names), "");
  CHECK_EQUAL(closest("rign", {}), "");
  CHECK_EQUAL(did_you_mean("rign", names), "; did you mean ring?");
  CHECK_EQUAL(did_you_mean("bruck", names), "");
}
