// Ranks that are threads over the fake driver, each with its end of an exchange in streams, an
// array and a stream of its owner.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/fixed_text.h"
#include "cuda/exchange/exchange.h"
#include "fake.h"
#include "fold/fold.h"
#include "schedule/schedule.h"

namespace testing {

inline constexpr char kImage[] = "fake image";
inline constexpr size_t kCount = 1500;

enum class StepsRun : int32_t { now, in_graphs };

inline farandole::cuda::Folding half_of_sum() {
  return {.dtype = farandole::DType::float32,
          .op = farandole::ReduceOp::sum,
          .scales = {.leaf = {}, .finish = {.factor = 0.5}}};
}

/// Whether that is so in the end.
template <typename Seen>
bool comes(const Seen& seen) {
  const farandole::Deadline patience = farandole::Deadline::after(std::chrono::seconds(60));
  while (!seen()) {
    if (patience.passed(farandole::now())) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

struct StepRank {
  static constexpr size_t kBytes = kCount * sizeof(float);

  std::shared_ptr<const farandole::cuda::DeviceContext> context;
  std::unique_ptr<farandole::cuda::DeviceMemory> array;
  farandole::cuda::PinnedMemory contents;
  farandole::cuda::DeviceStream owner;
  farandole::cuda::Exchange exchange;  // ends first: what it has under way uses the rest
  std::vector<std::unique_ptr<farandole::cuda::Moments>> moments;
  uint32_t newest = 0;

  StepRank(const std::shared_ptr<const farandole::cuda::DeviceContext>& of, int rank, int size,
           int doorbell, StepsRun run)
      : context(of),
        array(allocate_device(of, kBytes, farandole::cuda::Sharing::none)),
        contents(of, kBytes),
        owner(of),
        exchange(of, {.device = 0,
                      .rank = rank,
                      .size = size,
                      .doorbell = doorbell,
                      .spins = true,
                      .captured = run == StepsRun::in_graphs,
                      .link_blocks = 0,
                      .bucket_bytes = kBytes}) {}

  float* values() { return reinterpret_cast<float*>(contents.host()); }

  void put(float value) {
    for (size_t i = 0; i < kCount; ++i) values()[i] = value + static_cast<float>(i);
    owner.copy(array->address(), contents.address(), kBytes);
  }
  void get() {
    exchange.complete_before(*moments.back(), owner.handle());
    owner.copy(contents.address(), array->address(), kBytes);
  }

  /// Half of the sum of all ranks' arrays, in place, in two pieces.
  void launch(int rank, int size, farandole::cuda::Timing timing = farandole::cuda::Timing::off) {
    moments.push_back(exchange.moments({owner.handle()}, timing));
    exchange.begin(*moments.back(), 2);
    run_pieces(rank, size);
    newest = exchange.end(*moments.back());
  }
  /// The same of elements from `first` on, in one piece, by the schedule of this planner.
  void launch_lanes(const char* planner, size_t first = 0) {
    const farandole::cuda::LanesAsked asked{.planner = planner,
                                            .kind = farandole::Collective::all_reduce,
                                            .count = kCount - first,
                                            .segments = 2,
                                            .grain = 4};
    const farandole::cuda::DevicePointer at = array->address() + first * sizeof(float);
    const farandole::CudaPiece piece{
        .input = at, .output = at, .count = asked.count, .folding = half_of_sum()};
    moments.push_back(exchange.moments({owner.handle()}));
    exchange.begin(*moments.back(), 1);
    exchange.run_lanes(asked, piece, true);
    newest = exchange.end(*moments.back());
  }
  /// The same as launch(), into the graph that the owner's stream is being captured into.
  void capture(int rank, int size, uint32_t number) {
    exchange.captured().begin(owner.handle(), number);
    run_pieces(rank, size);
    exchange.captured().end();
  }
  void run_pieces(int rank, int size) {
    for (const size_t half : {size_t{0}, size_t{1}}) {
      const size_t part = kCount / 2, mine = part / static_cast<size_t>(size);
      const farandole::CudaMove in{half * part * 4, 0, part * 4, rank},
          out{0, half * part * 4, part * 4, rank};
      exchange.run({.strand = static_cast<int32_t>(half),
                    .input = array->address(),
                    .output = array->address(),
                    .in = {&in, 1},
                    .out = {&out, 1},
                    .first = static_cast<size_t>(rank) * mine,
                    .count = rank + 1 < size ? mine : part - static_cast<size_t>(rank) * mine,
                    .folds_to = farandole::kFoldsToAllBuckets,
                    .folding = half_of_sum()});
    }
  }
};

struct StepRanks {
  FreshDriver fresh;
  farandole::Fd doorbell = farandole::make_event_fd();
  std::shared_ptr<const farandole::cuda::DeviceContext> context;
  std::deque<StepRank> all;

  explicit StepRanks(int size, StepsRun run = StepsRun::now) : context(fresh.context()) {
    for (int r = 0; r < size; ++r) {
      all.emplace_back(context, r, size, doorbell.get(), run);
      all.back().exchange.open_bucket(kImage);
    }
    for (int r = 0; r < size; ++r)
      for (int other = 0; other < size; ++other)
        if (r != other)
          all[static_cast<size_t>(r)].exchange.map(
              static_cast<uint32_t>(other), all[static_cast<size_t>(other)].exchange.share(), 4);
  }
  ~StepRanks() {
    for (StepRank& rank : all)
      for (auto& moments : rank.moments) rank.exchange.give_back(std::move(moments));
    all.clear();
    context.reset();
  }
  StepRanks(const StepRanks&) = delete;
  StepRanks& operator=(const StepRanks&) = delete;
};

}  // namespace testing
