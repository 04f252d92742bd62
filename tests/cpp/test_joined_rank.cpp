// Ranks that have joined answer for themselves in the steps of those who train on.
#include "fusion/joined_rank_proxy.h"

#include <algorithm>

#include "engines.h"

using namespace farandole;
using testing::run_groups;

namespace {

constexpr int kRanks = 3, kSteps = 20;

std::shared_ptr<Reducer> reducer_of(const std::shared_ptr<Group>& group) {
  std::vector<Parameter> parameters;
  for (int i = 0; i < 8; ++i)
    parameters.push_back(
        {"layer " + std::to_string(i), static_cast<size_t>(1 + i * 211), DType::float32});
  ReducerOptions options;
  options.op = ReduceOp::sum;
  options.limits = {4000, 500};
  return std::make_shared<Reducer>(group, std::move(parameters), options);
}

/// In the reverse of the order that the plan expects, so that there is a better one.
void mark_all(Reducer& reducer, float value) {
  for (int p = 7; p >= 0; --p) {
    const std::vector<float> gradient(reducer.parameters()[static_cast<size_t>(p)].count, value);
    reducer.mark_ready(p, reinterpret_cast<const std::byte*>(gradient.data()));
  }
}

bool holds(Reducer& reducer, float value) {
  for (size_t b = 0; b < reducer.buckets().size(); ++b)
    for (const Placement& item : reducer.buckets()[b].placements) {
      const auto* begin = reinterpret_cast<const float*>(reducer.memory(b).get()) + item.offset;
      if (!std::all_of(begin, begin + item.count, [&](float x) { return x == value; }))
        return false;
    }
  return true;
}

}  // namespace

TEST(joined_ranks_take_part_in_the_steps_of_two_reducers) {
  for (const ProgressMode mode : {ProgressMode::automatic, ProgressMode::caller}) {
    std::atomic<bool> joined{false};
    run_groups(kRanks, mode, [&](const std::shared_ptr<Group>& group) {
      const auto a = reducer_of(group), b = reducer_of(group), idle = reducer_of(group);
      if (group->rank() > 0) {
        JoinedRankProxy here(*group, joined, {a, b, idle}, {});
        CHECK(here.wait(testing::patience()));
        CHECK((here.steps() == std::vector<int>{kSteps, kSteps / 2, 0}));
        CHECK(!a->step_open() && !b->step_open());
        return;
      }
      for (int step = 0; step < kSteps; ++step) {
        const bool both = step % 2 == 1;
        a->take_better_plan();
        if (both) b->take_better_plan();
        mark_all(*a, static_cast<float>(step));
        if (both) mark_all(*b, 1.0F);
        a->launch_rest();
        if (both) CHECK(b->wait(testing::patience()));  // inside a's step
        CHECK(a->wait(testing::patience()));
        CHECK(holds(*a, static_cast<float>(step)) && (!both || holds(*b, 1.0F)));
        CHECK(step > 0 || a->has_better_plan());
      }
      joined = true;
    });
  }
}

TEST(a_joined_rank_refuses_what_it_cannot_stand_in_for) {
  const std::atomic<bool> joined{false};
  auto hosts = hosts_in_process(2, testing::World::kArenaBytes);
  testing::run_ranks(2, [&](int rank) {
    EngineOptions options = testing::engine_options(ProgressMode::automatic);
    options.warn_after = std::chrono::milliseconds(50);
    const auto group =
        Group::world(std::make_shared<Engine>(std::move(hosts[static_cast<size_t>(rank)]), options),
                     {}, testing::patience());
    const auto begin = [&] {
      if (rank == 0) {
        group->submit({}, {}, {{Collective::barrier}}).wait(testing::patience());
        return;
      }
      JoinedRankProxy here(*group, joined, {}, {});
      while (!group->membership().detector->failed())
        here.wait(Deadline::after(std::chrono::milliseconds(10)));
      group->check();
    };
    CHECK_THROWS(begin(), Error, e.code() == ErrorCode::deadlock && e.where().rank == 1);
  });
}
