// One-shots, and folds between meetings: every rank a stream of launches, with host steps between
// them that write inputs and look at outputs, under many orders of turns. Under ThreadSanitizer
// these orders show what nothing orders.
#include <array>
#include <deque>
#include <thread>

#include "cases.h"
#include "check.h"
#include "schedule/slicing.h"

namespace farandole::cuda {
namespace {

constexpr int kSteps = 4;  // operations one behind the other: two more than a mailbox has sets
constexpr uint64_t kSeeds = testing::kThreadSanitizer ? 2 : 12;

/// One operation of all ranks.
struct Case {
  uint32_t size = 2, blocks = 2, threads = 4;
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  size_t count = 100;
  size_t offset = 0;      // of arrays, in elements behind a pack
  bool in_place = false;  // the output is the input
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.size << " ranks, " << c.blocks << " blocks of " << c.threads << ", "
             << name_of(c.dtype) << " " << name_of(c.op) << ", " << c.count << " elements at "
             << c.offset << (c.in_place ? ", in place" : "");
}

/// Ranks with their arrays; makes streams of kSteps operations that fill and check them.
class Exchange {
 public:
  explicit Exchange(const Case& what, uint32_t first_epoch = 0)
      : case_(what), ranks_(what.size, first_epoch), wrong_(what.size) {
    for (auto& steps : wrong_) steps.fill(1);  // until it is looked at
    folding_ = {what.dtype, what.op,
                scales_for(what.dtype, what.op, 0.5, 1, static_cast<int>(what.size))};
    for (uint32_t r = 0; r < what.size; ++r) {
      inputs_.emplace_back(what.dtype, what.count, what.offset);
      outputs_.emplace_back(what.dtype, what.count, what.offset);
    }
    if (what.in_place) outputs_.swap(inputs_), inputs_.clear();
    for (int step = 0; step < kSteps; ++step) add_data(step);
  }

  std::vector<Stream> streams() {
    std::vector<Stream> all(case_.size);
    for (uint32_t r = 0; r < case_.size; ++r)
      for (size_t step = 0; step < kSteps; ++step) {
        all[r].push_back(host_step(work([this, r, step] {
          output(r).fill(std::byte{0xee});
          input(r).fill(given_[step][r]);
        })));
        all[r].push_back(launch(r));
        all[r].push_back(host_step(work([this, r, step] {
          const bool right = output(r).bytes() == expected_[step];
          wrong_[r][step] = !right || !output(r).surroundings_are_intact();
        })));
      }
    return all;
  }

  Launch launch(uint32_t rank) {
    return launch_of(kernel_name("one_shot", case_.dtype),
                     all_reduce_in_one(ranks_.peers(rank), input(rank).data(), output(rank).data(),
                                       ranks_.mailboxes(), case_.count, folding_),
                     case_.blocks, case_.threads);
  }

  /// Reports what the host steps found. They run in many fibers, and CHECK works in one thread.
  void report() const {
    for (uint32_t r = 0; r < case_.size; ++r)
      for (size_t step = 0; step < kSteps; ++step) {
        const testing::Note note("rank ", r, ", operation ", step);
        CHECK(!wrong_[r][step]);
      }
  }

  Ranks& ranks() { return ranks_; }

 private:
  Array& output(uint32_t rank) { return outputs_[rank]; }
  Array& input(uint32_t rank) { return case_.in_place ? outputs_[rank] : inputs_[rank]; }

  const std::function<void()>& work(std::function<void()> body) {
    return works_.emplace_back(std::move(body));
  }

  void add_data(int step) {
    std::vector<Bytes> given;
    for (uint32_t r = 0; r < case_.size; ++r)
      given.push_back(
          some_elements(case_.dtype, case_.count, static_cast<uint64_t>(step) * 100 + r));
    expected_.push_back(folded(given, folding_));
    given_.push_back(std::move(given));
  }

  Case case_;
  Ranks ranks_;
  Folding folding_;
  std::vector<Array> inputs_, outputs_;
  std::vector<std::vector<Bytes>> given_;        // by operation and rank
  std::vector<Bytes> expected_;                  // by operation
  std::vector<std::array<char, kSteps>> wrong_;  // by rank and operation
  std::deque<std::function<void()>> works_;      // where they lie, they stay
};

void run_under_seeds(const Case& what, uint32_t first_epoch = 0) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const testing::Note note(what, ", seed ", seed);
    Exchange exchange(what, first_epoch);
    run_together(exchange.streams(), seed);
    exchange.report();
  }
}

void run_all_sizes(Case what) {
  for (const uint32_t size : {1U, 2U, 3U, 4U, 5U, 8U}) {
    what.size = size;
    run_under_seeds(what);
  }
}

TEST(cuda_one_shot_under_any_order_of_turns) {
  run_all_sizes({});
  run_all_sizes({.dtype = DType::float16, .offset = 1, .in_place = true});
}

/// A reader that sees the word `done` finds the output, while the kernel may still run.
void one_shots_that_tell(uint32_t size, uint32_t blocks, size_t count, uint64_t seed) {
  Ranks ranks(size);
  const Folding folding{DType::float32, ReduceOp::sum};
  std::vector<Array> inputs, outputs;
  std::vector<uint32_t> done(size, 0), seen(size, 0);
  std::vector<int> wrong(size, 0);
  const uint32_t never = 0;
  std::deque<std::function<void()>> works;
  const auto step = [&](std::function<void()> body) {
    return host_step(works.emplace_back(std::move(body)));
  };
  std::vector<Bytes> given;
  for (uint32_t r = 0; r < size; ++r) {
    given.push_back(some_elements(folding.dtype, count, r));
    inputs.emplace_back(folding.dtype, given[r]);
    outputs.emplace_back(folding.dtype, count);
  }
  const Bytes expected = folded(given, folding);
  std::vector<Stream> streams(2 * static_cast<size_t>(size));
  for (uint32_t r = 0; r < size; ++r)
    for (uint32_t number = 1; number <= 3; ++number) {
      OneShot job = all_reduce_in_one(ranks.peers(r), inputs[r].data(), outputs[r].data(),
                                      ranks.mailboxes(), count, folding);
      job.done = &done[r];
      job.number = number;
      streams[r].push_back(step([&, r, number] {
        wait_for(&seen[r], number - 1, &never);
        outputs[r].fill(std::byte{0xee});
      }));
      streams[r].push_back(launch_of("farandole_one_shot_float32", job, blocks, 4));
      streams[size + r].push_back(step([&, r, number] {
        wait_for(&done[r], number, &never);
        wrong[r] += static_cast<int>(outputs[r].bytes() != expected);
        store_release(&seen[r], number);
      }));
    }
  run_together(streams, seed);
  for (uint32_t r = 0; r < size; ++r) CHECK_EQUAL(wrong[r], 0);
}

TEST(cuda_one_shot_tells_of_its_end) {
  const size_t slot = kSlotBytes / size_of(DType::float32);
  for (const uint32_t blocks : {1U, 3U})
    for (const size_t count : {size_t{0}, size_t{5}, 2 * slot + 5})
      for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        const testing::Note note(blocks, " blocks, ", count, " elements, seed ", seed);
        one_shots_that_tell(2, blocks, count, seed);
      }
}

TEST(cuda_one_shot_in_rounds) {
  const size_t slot = kSlotBytes / size_of(DType::float32);
  for (const uint32_t blocks : {1U, 2U, 3U})
    run_under_seeds({.size = 3, .blocks = blocks, .count = 4 * slot + 5});
}

TEST(cuda_one_shots_of_every_dtype_operation_and_count) {
  if (testing::kThreadSanitizer) return;
  for (const DTypeRow& d : kDTypes)
    for (const ReduceOpRow& o : kReduceOps)
      if (has_meaning(o.op, d.dtype))
        for (const size_t count : {0, 1, 15, 16, 1000}) {
          const Case now{.size = 3, .dtype = d.dtype, .op = o.op, .count = count};
          const testing::Note note(now);
          Exchange exchange(now);
          run_together(exchange.streams(), count);
          exchange.report();
        }
}

TEST(cuda_meetings_are_counted_beyond_32_bits) {
  run_under_seeds({.size = 3, .count = 20}, ~uint32_t{0} - 2);
}

TEST(cuda_one_shots_of_other_grids_follow_each_other) {
  // One set of flags for all: what one leaves behind is where the next begins.
  constexpr uint32_t size = 3, count = 2 * kSlotBytes / sizeof(float) + 40;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const testing::Note note("seed ", seed);
    Ranks ranks(size);
    const Folding folding{DType::float32, ReduceOp::sum};
    std::vector<Bytes> given;
    std::vector<Array> arrays, outputs;
    for (uint32_t r = 0; r < size; ++r) {
      given.push_back(some_elements(folding.dtype, count, r));
      arrays.emplace_back(folding.dtype, given[r]);
      outputs.emplace_back(folding.dtype, count);
    }
    std::vector<Stream> streams(size);
    for (uint32_t r = 0; r < size; ++r) {
      const Peers peers = ranks.peers(r);
      const auto one = [&](const Array& from, const Array& to, uint32_t blocks) {
        streams[r].push_back(launch_of(
            "farandole_one_shot_float32",
            all_reduce_in_one(peers, from.data(), to.data(), ranks.mailboxes(), count, folding),
            blocks, 4));
      };
      one(arrays[r], outputs[r], 1);
      one(outputs[r], arrays[r], 3);
      one(arrays[r], outputs[r], 2);
      one(outputs[r], outputs[r], 1);
    }
    run_together(streams, seed);
    Bytes expected = folded(given, folding);
    for (int again = 0; again < 3; ++again)
      expected = folded(std::vector<Bytes>(size, expected), folding);
    for (const Array& output : outputs) CHECK(output.bytes() == expected);
  }
}

/// A fold between two meetings, each of two kernels: no kernel runs while another rank's must.
TEST(cuda_steps_ordered_by_streams) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const testing::Note note("seed ", seed);
    const uint32_t size = 3, count = 70;
    Ranks ranks(size);
    const Folding folding{DType::bfloat16, ReduceOp::mean,
                          scales_for(DType::bfloat16, ReduceOp::mean, 1, 1, size)};
    std::vector<Bytes> given;
    std::vector<Array> arrays;
    std::deque<std::function<void()>> works;
    for (uint32_t r = 0; r < size; ++r) {
      given.push_back(some_elements(folding.dtype, count, r));
      arrays.emplace_back(folding.dtype, count);
    }
    std::vector<Stream> streams(size);
    for (uint32_t r = 0; r < size; ++r) {
      const Peers peers = ranks.peers(r);
      const auto meet_others = [&] {
        streams[r].push_back(launch_of("farandole_arrive", Meet{peers, 5}, 1, 4));
        streams[r].push_back(launch_of("farandole_await", Meet{peers, 5}, 1, 4));
      };
      streams[r].push_back(
          host_step(works.emplace_back([&arrays, &given, r] { arrays[r].fill(given[r]); })));
      meet_others();
      const Slice mine =
          part({Space::input, 0, count}, static_cast<int>(size), static_cast<int>(r));
      const Fold fold =
          fold_of(addresses(arrays), writable(arrays), mine.offset, mine.count, folding);
      streams[r].push_back(launch_of("farandole_fold_bfloat16", fold, 2, 4));
      meet_others();
    }
    run_together(streams, seed);
    for (const Array& array : arrays) CHECK(array.bytes() == folded(given, folding));
  }
}

/// Real threads: a rank each, or a thread for each of its blocks.
TEST(cuda_one_shots_of_ranks_in_threads) {
  for (const auto run_one : {run, run_in_threads}) {
    Exchange exchange({.size = 3, .blocks = 3});
    const std::vector<Stream> streams = exchange.streams();
    std::vector<std::thread> threads;
    for (const Stream& stream : streams)
      threads.emplace_back([&stream, run_one] {
        for (const Launch& launch : stream) run_one(launch);
      });
    for (std::thread& thread : threads) thread.join();
    exchange.report();
  }
}

TEST(cuda_a_rank_that_never_comes_is_a_deadlock) {
  Exchange exchange({.size = 3});
  const Launch launches[] = {exchange.launch(0), exchange.launch(2)};
  CHECK_THROWS(run_together(launches, 1), std::runtime_error,
               std::string_view(e.what()).starts_with("deadlock"));
}

TEST(cuda_kernels_end_when_the_group_is_aborted) {
  Exchange exchange({.size = 3});
  exchange.ranks().abort(1);
  const Launch launches[] = {exchange.launch(0), exchange.launch(2)};
  run_together(launches, 1);  // or it is a deadlock
  Ranks ranks(2);
  ranks.abort(1);
  run(launch_of("farandole_arrive", Meet{ranks.peers(0), 0}, 1, 4));
  run(launch_of("farandole_await", Meet{ranks.peers(0), 0}, 1, 4));
}

TEST(cuda_launches_that_make_no_sense_are_refused) {
  Exchange exchange({});
  Launch launch = exchange.launch(0);
  launch.parameters.pop_back();
  CHECK_THROWS(run(launch), std::logic_error,
               std::string(e.what()).find("bytes") != std::string::npos);
  launch = exchange.launch(0);
  launch.grid.x = 0;
  CHECK_THROWS(run(launch), std::logic_error, std::string(e.what()) == "launch: grid");
  launch.kernel = kernel_named("farandole_nothing");
  CHECK_THROWS(run(launch), std::logic_error,
               std::string(e.what()) == "launch: there is no such kernel");
}

TEST(cuda_grids_fit_the_data_and_the_device) {
  const Room whole{.processors = 132}, shared{.processors = 16, .ranks_on_device = 8};
  CHECK_EQUAL(blocks_for(Work::alone, 0, whole), 1U);
  CHECK_EQUAL(blocks_for(Work::alone, 16 * 4 * kThreads + 1, whole), 2U);
  CHECK_EQUAL(blocks_for(Work::alone, uint64_t{1} << 40, whole), 132U * 32);
  CHECK_EQUAL(blocks_for(Work::links, 0, whole), 1U);
  CHECK_EQUAL(blocks_for(Work::links, 16 * 4 * kThreads * 5, whole), 5U);
  CHECK_EQUAL(blocks_for(Work::links, uint64_t{1} << 40, whole), 41U);  // 1.5 * 900 KB / 32 KiB
  CHECK_EQUAL(blocks_for(Work::links, uint64_t{1} << 40, {.processors = 132, .link_blocks = 7}),
              7U);
  CHECK_EQUAL(blocks_for(Work::lasting, uint64_t{1} << 40, whole), 132U * 8);
  CHECK_EQUAL(blocks_for_chunks(0, 132), 1U);
  CHECK_EQUAL(blocks_for_chunks(1000, 132), 1000U);
  CHECK_EQUAL(blocks_for_chunks(uint64_t{1} << 40, 132), 132U * 32);
  CHECK_EQUAL(blocks_for(Work::slots, kSlotBytes * 2, whole), 2U);
  CHECK_EQUAL(blocks_for(Work::exchange, uint64_t{1} << 40, whole), kMostChannels);
  // Eight ranks of 16 processors: all their blocks together are no more than are resident.
  CHECK_EQUAL(blocks_for(Work::exchange, uint64_t{1} << 40, shared), 4U);
  CHECK_EQUAL(blocks_for(Work::exchange, 1, {.processors = 1, .ranks_on_device = 8}), 1U);
}

TEST(cuda_parameters_fit_a_launch) {
  for (const Kernel& kernel : kernels()) {
    const testing::Note note(kernel.name);
    CHECK(kernel.parameter_bytes <= 4096);  // of compute capability 7 and drivers before 12.1
  }
}

}  // namespace
}  // namespace farandole::cuda
