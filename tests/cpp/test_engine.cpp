// Engines: simulated worlds, then ranks that are threads and end, leave or fail.
#include "core/sim_world.h"
#include "engines.h"

#include <atomic>
#include <barrier>
#include <mutex>
#include <thread>

using namespace farandole;
using testing::error_of;
using testing::run_groups;
using testing::Sum;

TEST(engines_of_simulated_worlds_keep_every_promise) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const testing::Note note("seed ", seed);
    const SimReport report = simulate(seed, 20, 1 + static_cast<int>(seed % 6));
    CHECK_EQUAL(report.complaint, "");
  }
}

namespace {

Error verdict_of(const Handle& handle) {
  try {
    CHECK(handle.wait(testing::patience()));
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::internal, "no error");
}

}  // namespace

TEST(engine_that_ends_fails_what_is_in_flight_everywhere) {
  for (const ProgressMode mode : {ProgressMode::thread, ProgressMode::caller}) {
    std::atomic<int> completions{0};
    std::barrier all_have_submitted(3);
    run_groups(3, mode, [&](const std::shared_ptr<Group>& group) {
      if (group->rank() == 2) {  // its engine ends; the others are in an operation
        all_have_submitted.arrive_and_wait();
        return;
      }
      auto sum = std::make_shared<Sum>(group->rank(), 3, 50'000);
      Options options{{Collective::all_reduce}};
      options.keepalive = sum;
      options.completion = [&](const Error* error) {
        completions += error != nullptr && error->code() == ErrorCode::early_exit ? 1 : 1000;
      };
      const Handle handle = group->submit(sum->buffer(), sum->buffer(), std::move(options));
      all_have_submitted.arrive_and_wait();
      if (group->rank() == 1) return;  // and so does this one, with its operation in flight
      const Error verdict = verdict_of(handle);
      CHECK(verdict.code() == ErrorCode::early_exit);
      CHECK_THROWS(group->check(), Error, std::string(e.what()) == verdict.what());
    });
    CHECK_EQUAL(completions.load(), 2);
  }
}

TEST(engine_may_leave_while_others_still_take_the_result) {
  // The last operation ends at different times: a rank that has done its share may leave.
  for (int round = 0; round < 20; ++round)
    run_groups(3, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
      Sum sum(group->rank(), 3, round % 2 == 0 ? 10 : 5'000);
      CHECK_EQUAL(error_of(group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}})),
                  "");
      CHECK(sum.is_right());
    });
}

TEST(engine_gives_all_ranks_the_verdict_of_an_abort) {
  std::mutex mutex;
  std::vector<std::string> verdicts;
  std::barrier all_have_begun(3);
  run_groups(3, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    const auto stream = group->open_stream("bystander");
    Sum sum(group->rank(), 3, 1000), other(group->rank(), 3, 1000);
    CHECK_EQUAL(error_of(group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}})),
                "");
    all_have_begun.arrive_and_wait();
    std::vector<std::string> mine;
    if (group->rank() == 0) {
      group->abort(Error(ErrorCode::remote_error, "rank 0 met an exception"));
      CHECK_THROWS(group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}}), Error,
                   e.code() == ErrorCode::remote_error);
      return;
    }
    try {
      const Handle a = group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}});
      const Handle b =
          group->submit_to(stream, other.buffer(), other.buffer(), {{Collective::all_reduce}});
      std::thread user([&] { mine.push_back(error_of(a)); });
      const std::string second = error_of(b);
      user.join();
      mine.push_back(second);
    } catch (const Error& error) {  // it was known before the operations were
      mine.emplace_back(error.what());
    }
    const std::lock_guard lock(mutex);
    verdicts.insert(verdicts.end(), mine.begin(), mine.end());
  });
  CHECK(verdicts.size() >= 2);
  for (const std::string& verdict : verdicts) {
    CHECK(verdict.find("rank 0 met an exception") != std::string::npos);
    CHECK_EQUAL(verdict, verdicts.front());
  }
}

TEST(engine_keeps_a_closed_stream_until_no_peer_can_read_it) {
  auto hosts = hosts_in_process(2, testing::World::kArenaBytes);
  EngineOptions options;
  options.threads = false;
  std::vector<std::shared_ptr<Engine>> engines;
  for (Host& host : hosts) engines.push_back(std::make_shared<Engine>(std::move(host), options));
  FailureRecord cell;
  const auto open = [&](int rank, uint64_t number) {
    const Membership membership{
        7, rank, {0, 1}, std::make_shared<HostFailureDetector>(cell), &cell.state.value};
    return engines[static_cast<size_t>(rank)]->open_stream(membership, "", number);
  };
  const auto in_use = [&](int rank) {
    return engines[static_cast<size_t>(rank)]->counters().arena_bytes;
  };
  auto first = open(0, 1);
  const size_t one_page = in_use(0);
  first.reset();  // rank 1 may still come, and would find a page that means something else
  auto second = open(0, 2);
  CHECK_EQUAL(in_use(0), 2 * one_page);
  open(1, 1).reset();  // it came and went: both pages may go
  open(1, 3).reset();
  open(0, 3).reset();
  second.reset();
  open(1, 2).reset();
  open(0, 4);
  open(1, 4);
  CHECK_EQUAL(in_use(0), one_page);
  CHECK_EQUAL(in_use(1), one_page);
}

TEST(engine_opens_and_closes_more_streams_than_its_directory_has_places) {
  run_groups(2, ProgressMode::caller, [&](const std::shared_ptr<Group>& group) {
    for (size_t i = 0; i < kDirectoryEntries + 100; ++i) {
      const auto stream = group->open_stream("");
      // Ranks meet often enough that the pages one is ahead by fit into its small arena.
      if (i % 20 != 0) continue;
      Sum sum(group->rank(), 2, 10);
      CHECK_EQUAL(error_of(group->submit_to(stream, sum.buffer(), sum.buffer(),
                                            {{Collective::all_reduce}}, true)),
                  "");
      CHECK(sum.is_right());
    }
    CHECK_EQUAL(error_of(group->submit({}, {}, {{Collective::barrier}})), "");
  });
}
