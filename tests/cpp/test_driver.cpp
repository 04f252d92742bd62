// The choice of the thread that drives progress, while many wait, submit and leave, in every mode.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "engine/task.h"
#include "engines.h"

using namespace farandole;
using testing::error_of;
using testing::run_groups;
using testing::Sum;

namespace {

constexpr ProgressMode kModes[] = {ProgressMode::automatic, ProgressMode::thread,
                                   ProgressMode::caller};

constexpr size_t kCounts[] = {1, 100, 4'000, 40'000};  // ll, one_shot, cico

/// A task whose polls take long, as those of an MPI that yields its core may.
class Slow : public Task {
 public:
  bool poll(TimePoint) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++polls_;
    return false;
  }
  void look_around(TimePoint) override {
    int never = 0;
    polls_before_look_.compare_exchange_strong(never, std::max(1, polls_.load()));
  }
  /// 0 if no thread has looked around yet.
  int polls_before_look() const { return polls_before_look_.load(); }

 private:
  std::atomic<int> polls_{0}, polls_before_look_{0};
};

}  // namespace

TEST(driver_looks_after_the_others_also_where_turns_take_long) {
  constexpr int kRanks = 2;
  const auto slow = std::make_shared<Slow>();
  run_groups(kRanks, ProgressMode::caller, [&](const std::shared_ptr<Group>& group) {
    Sum sum(group->rank(), kRanks, 100);
    if (group->rank() == 0) {
      group->engine()->add_task(slow);
    } else {
      const TimePoint until = testing::patience().at;
      while (slow->polls_before_look() == 0 && now() < until) std::this_thread::yield();
    }
    CHECK_EQUAL(
        error_of(group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}}, true)), "");
    CHECK(sum.is_right());
    if (group->rank() == 0) group->engine()->drop_task(slow);
  });
  CHECK(slow->polls_before_look() > 0 && slow->polls_before_look() <= 16);
}

TEST(driver_wakes_every_one_of_several_waiting_threads) {
  constexpr int kRanks = 3, kStreams = 3, kRounds = 30;
  for (const ProgressMode mode : kModes)
    run_groups(kRanks, mode, [&](const std::shared_ptr<Group>& group) {
      std::vector<std::shared_ptr<Stream>> streams;
      for (int s = 0; s < kStreams; ++s) streams.push_back(group->open_stream("stream"));
      std::vector<std::thread> users;
      for (int s = 0; s < kStreams; ++s)
        users.emplace_back([&, s] {
          for (int i = 0; i < kRounds; ++i) {
            Sum sum(group->rank(), kRanks, kCounts[static_cast<size_t>(s + i) % 4]);
            const Handle handle =
                group->submit_to(streams[static_cast<size_t>(s)], sum.buffer(), sum.buffer(),
                                 {{Collective::all_reduce}}, i % 2 == 0);
            CHECK_EQUAL(error_of(handle), "");
            CHECK(sum.is_right());
          }
        });
      for (std::thread& user : users) user.join();
    });
}

TEST(driver_lets_waiters_give_up_and_somebody_else_goes_on) {
  constexpr int kRanks = 2;
  for (const ProgressMode mode : kModes)
    run_groups(kRanks, mode, [&](const std::shared_ptr<Group>& group) {
      for (int i = 0; i < 20; ++i) {
        std::atomic<bool> completed{false};
        Sum sum(group->rank(), kRanks, 30'000);
        Options options{{Collective::all_reduce}};
        options.completion = [&](const Error*) { completed.store(true); };
        const Handle handle = group->submit(sum.buffer(), sum.buffer(), std::move(options), true);
        std::thread impatient(
            [&] { (void)handle.wait(Deadline::after(std::chrono::microseconds(i))); });
        (void)handle.wait(Deadline::after(std::chrono::microseconds(2 * i)));
        impatient.join();
        // No thread waits now: the progress thread finishes the operations that have begun.
        const TimePoint until = testing::patience().at;
        while (!completed.load() && now() < until) std::this_thread::yield();
        CHECK(completed.load());
        CHECK(handle.done() && sum.is_right());
      }
    });
}

TEST(driver_runs_what_nobody_waits_for) {
  constexpr int kRanks = 3, kOperations = 40;
  for (const ProgressMode mode : kModes)
    run_groups(kRanks, mode, [&](const std::shared_ptr<Group>& group) {
      std::vector<Sum> sums;
      for (int i = 0; i < kOperations; ++i)
        sums.emplace_back(group->rank(), kRanks, kCounts[static_cast<size_t>(i) % 4]);
      std::atomic<int> completions{0};
      std::vector<Handle> handles;
      for (Sum& sum : sums) {
        Options options{{Collective::all_reduce}};
        options.completion = [&](const Error* error) {
          completions += error == nullptr ? 1 : 1000;
        };
        handles.push_back(group->submit(sum.buffer(), sum.buffer(), std::move(options)));
      }
      const TimePoint until = testing::patience().at;
      while (completions.load() < kOperations && now() < until) std::this_thread::yield();
      CHECK_EQUAL(completions.load(), kOperations);
      for (const Sum& sum : sums) CHECK(sum.is_right());
    });
}

TEST(driver_of_few_threads_polls_where_they_wait_and_nowhere_else) {
  constexpr int kRanks = 2;
  auto hosts = hosts_in_process(kRanks, testing::World::kArenaBytes);
  testing::run_ranks(kRanks, [&](int rank) {
    EngineOptions options = testing::engine_options(ProgressMode::thread);
    options.few_threads = FewThreads{std::this_thread::get_id(), "a test says so"};
    const auto group = Group::world(
        std::make_shared<Engine>(std::move(hosts[static_cast<size_t>(rank)]), std::move(options)),
        {}, testing::patience());
    Sum sum(rank, kRanks, 40'000), other(rank, kRanks, 100);
    const auto refused = [&](auto call) {
      std::string verdict;
      std::thread([&] {
        try {
          call();
        } catch (const Error& error) {
          verdict = error.verdict();
        }
      }).join();
      CHECK(verdict.find("a test says so") != std::string::npos);
    };
    Handle handle;
    std::thread([&] {  // any thread may submit
      handle = group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}});
    })
        .join();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!handle.done());
    refused([&] { (void)handle.wait(testing::patience()); });
    refused([&] {
      (void)group->submit(other.buffer(), other.buffer(), {{Collective::all_reduce}}, true);
    });
    CHECK_THROWS(group->engine()->driver().require_progress("it"), Error,
                 e.code() == ErrorCode::invalid_argument);
    CHECK_EQUAL(error_of(handle), "");
    CHECK(sum.is_right());
  });
}
