// Collectives in CUDA graphs over the fake driver, by ranks that are threads: what replays give,
// and what is noticed of graphs that do not fit each other, and of ranks that do not come.
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "step_ranks.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::Capture;
using testing::comes;
using testing::contains;
using testing::fake;
using testing::FreshDriver;
using testing::kCount;
using testing::kImage;
using testing::StepRank;
using testing::StepRanks;
using testing::StepsRun;

namespace {

/// A collective that drains, or meets another, may read what is being written: nobody uses it.
constexpr bool kRacesByDesign = testing::kThreadSanitizer;

/// One rank's graph: a collective for each number.
Capture graph_of(StepRank& rank, int r, int size, const std::vector<uint32_t>& numbers) {
  Capture capture(rank.context, rank.owner);
  for (const uint32_t number : numbers) rank.capture(r, size, number);
  CHECK_EQUAL(capture.end(), kSuccess);
  return capture;
}

/// Drains until no graph runs, as ranks that have failed do.
void drain(StepRanks& ranks) {
  const Deadline patience = Deadline::after(std::chrono::seconds(60));
  for (StepRank& rank : ranks.all)
    while (!rank.exchange.is_complete(rank.exchange.captured().state().begun) &&
           !patience.passed(now())) {
      for (StepRank& each : ranks.all) each.exchange.drain();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  for (StepRank& rank : ranks.all) rank.owner.synchronize();
  CHECK(!patience.passed(now()));
}

}  // namespace

TEST(captured_steps_give_the_same_at_every_replay) {
  for (const int size : {1, 2, 3}) {
    for (const char* seed : {"1", "2"}) {
      StepRanks ranks(size, StepsRun::in_graphs);
      fake().configure("jitter", seed);
      std::vector<std::thread> threads;
      for (int r = 0; r < size; ++r)
        threads.emplace_back([&, r] {
          StepRank& me = ranks.all[static_cast<size_t>(r)];
          Capture graph = graph_of(me, r, size, {0, 1});  // the second one of what the first leaves
          for (int round = 0; round < 3; ++round) {
            const testing::Note note("seed ", seed, ", rank ", r, " of ", size, ", round ", round);
            me.put(static_cast<float>(8 * r + round));
            CHECK_EQUAL(graph.launch(me.owner), kSuccess);
            me.owner.copy(me.contents.address(), me.array->address(), StepRank::kBytes);
            me.owner.synchronize();
            const auto n = static_cast<float>(size);
            bool right = true;
            for (size_t i = 0; i < kCount; ++i) {
              const float once = 0.5F * (4 * n * (n - 1) +
                                         n * (static_cast<float>(round) + static_cast<float>(i)));
              right &= me.values()[i] == 0.5F * n * once;
            }
            CHECK(right);
            CHECK(me.exchange.is_complete(2 * static_cast<uint32_t>(round) + 2));
          }
          const CudaGraphState state = me.exchange.captured().state();
          CHECK_EQUAL(state.begun, 6U);
          CHECK_EQUAL(state.ended, 6U);
          CHECK_EQUAL(state.at, 1U);
          CHECK_EQUAL(state.differs, -1);
          CHECK_EQUAL(state.overlaps, 0);
        });
      for (std::thread& thread : threads) thread.join();
    }
  }
}

TEST(captured_steps_of_another_order_are_noticed_on_both_ranks) {
  if (kRacesByDesign) return;
  StepRanks ranks(2, StepsRun::in_graphs);
  for (int r = 0; r < 2; ++r) {
    StepRank& me = ranks.all[static_cast<size_t>(r)];
    Capture five = graph_of(me, r, 2, {5}), seven = graph_of(me, r, 2, {7});
    me.put(1);
    CHECK_EQUAL((r == 0 ? five : seven).launch(me.owner), kSuccess);
    CHECK_EQUAL((r == 0 ? seven : five).launch(me.owner), kSuccess);
  }
  for (size_t r = 0; r < 2; ++r) {
    const CapturedSteps& steps = ranks.all[r].exchange.captured();
    CHECK(comes([&] { return steps.is_wrong(); }));
    CHECK_EQUAL(steps.state().differs, static_cast<int32_t>(1 - r));
    CHECK_EQUAL(steps.state().own + steps.state().theirs, 12U);
  }
  drain(ranks);
}

TEST(captured_steps_that_run_at_once_are_noticed) {
  if (kRacesByDesign) return;
  StepRanks ranks(2, StepsRun::in_graphs);
  StepRank& here = ranks.all[0];
  const DeviceStream other(ranks.context);
  Capture graph = graph_of(here, 0, 2, {3});
  CHECK_EQUAL(graph.launch(here.owner), kSuccess);
  CHECK(comes([&] { return here.exchange.captured().state().begun == 1; }));
  CHECK_EQUAL(here.exchange.captured().state().overlaps, 0);
  CHECK_EQUAL(graph.launch(other), kSuccess);
  CHECK(comes([&] { return here.exchange.captured().state().overlaps == 1; }));
  drain(ranks);
  other.synchronize();
}

TEST(captured_steps_that_run_at_once_on_all_ranks_end) {
  if (kRacesByDesign) return;
  for (const char* seed : {"1", "2", "3", "4"}) {
    StepRanks ranks(2, StepsRun::in_graphs);
    fake().configure("jitter", seed);
    const DeviceStream others[2]{DeviceStream(ranks.context), DeviceStream(ranks.context)};
    for (int r = 0; r < 2; ++r) {
      StepRank& me = ranks.all[static_cast<size_t>(r)];
      Capture graph = graph_of(me, r, 2, {1, 2});
      CHECK_EQUAL(graph.launch(me.owner), kSuccess);
      CHECK_EQUAL(graph.launch(others[r]), kSuccess);
      // The first waits for rank 1, which has not launched anything: both are begun.
      if (r == 0) CHECK(comes([&] { return me.exchange.captured().is_wrong(); }));
    }
    CHECK(comes([&] {
      bool idle = true;
      for (size_t r = 0; r < 2; ++r) {
        ranks.all[r].exchange.drain();
        idle &= others[r].idle() && ranks.all[r].owner.idle();
      }
      return idle;
    }));
  }
}

TEST(captured_steps_wait_for_no_rank_when_they_are_drained) {
  if (kRacesByDesign) return;
  StepRanks ranks(3, StepsRun::in_graphs);
  StepRank& here = ranks.all[1];
  Capture graph = graph_of(here, 1, 3, {0, 1, 2});
  CHECK_EQUAL(graph.launch(here.owner), kSuccess);
  CHECK(comes([&] { return here.exchange.captured().state().begun == 1; }));
  CHECK(!here.exchange.is_complete(1));
  drain(ranks);
  CHECK_EQUAL(here.exchange.captured().state().ended, 3U);
}

TEST(captured_steps_are_kept_for_their_graphs_and_given_up_at_the_end) {
  if (kRacesByDesign) return;
  StepRanks ranks(2, StepsRun::in_graphs);
  StepRank& here = ranks.all[0];
  std::optional<Capture> graph(graph_of(here, 0, 2, {0, 1}));
  CHECK(here.exchange.has_graphs());
  CHECK_EQUAL(graph->launch(here.owner), kSuccess);
  here.exchange.give_up_graphs();
  CHECK_EQUAL(graph->launch(here.owner), kSuccess);  // also what comes later
  here.owner.synchronize();
  graph.reset();
  CHECK(!here.exchange.has_graphs());
}

TEST(capture_that_has_ended_takes_no_steps) {
  StepRanks ranks(1, StepsRun::in_graphs);
  StepRank& here = ranks.all[0];
  CHECK_THROWS(here.exchange.captured().begin(here.owner.handle(), 0), Error,
               e.code() == ErrorCode::invalid_argument &&
                   contains(e.verdict(), "the capture of a CUDA graph ended"));
}

TEST(captured_steps_need_streams_that_wait_and_memory_by_descriptors) {
  for (const auto& [setting, why] :
       {std::pair{"memory_operations", "cannot let streams wait for words"},
        std::pair{"virtual_memory", "cannot be shared by file descriptors"}}) {
    const testing::Note note(setting);
    const FreshDriver fresh;
    fake().configure(setting, "0");
    const Fd doorbell = make_event_fd();
    StepRank rank(fresh.context(), 0, 2, doorbell.get(), StepsRun::in_graphs);
    CHECK_THROWS(rank.exchange.open_bucket(kImage), Error,
                 e.code() == ErrorCode::device && contains(e.verdict(), why) &&
                     contains(e.verdict(), "CUDA graphs"));
  }
}

TEST(calls_of_ours_spoil_no_capture_in_the_program) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceStream captured(context), other(context);
  Capture capture(context, captured, Capture::global);
  std::thread([&] {
    const auto memory = allocate_device(context, 4096, Sharing::none);
    const PinnedMemory pinned(context, 64);
    CHECK(other.idle());
  }).join();
  other.synchronize();
  CHECK(captured.is_captured());
  CHECK_EQUAL(capture.end(), kSuccess);
  CHECK(!captured.is_captured());
  // The same by the program itself, in the mode that threads begin with.
  Capture spoilt(context, captured, Capture::global);
  {
    const DeviceContext::Use driver(*context);
    int mode = Capture::global;
    driver->ThreadExchangeStreamCaptureMode(&mode);
    DevicePointer address = 0;
    CHECK_EQUAL(driver->MemAlloc(&address, 4096), 900);
    driver->ThreadExchangeStreamCaptureMode(&mode);
  }
  CHECK_EQUAL(spoilt.end(), 901);
}
