// Gradients that many threads submit, in every order, while buckets are already being reduced.
#include "fusion/reducer.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <thread>

#include "engines.h"

using namespace farandole;
using testing::run_groups;

namespace {

constexpr int kRanksThatReduce = 3;

std::vector<Parameter> model() {
  std::vector<Parameter> parameters;
  for (int i = 0; i < 12; ++i)
    parameters.push_back({"layer " + std::to_string(i), static_cast<size_t>(1 + i * i * 37),
                          i % 5 == 4 ? DType::float64 : DType::float32});
  return parameters;
}

ReducerOptions small_buckets(bool overlap) {
  ReducerOptions options;
  options.op = ReduceOp::sum;
  options.limits = {4000, 500};
  options.overlap = overlap;
  return options;
}

/// The value of every element of `rank`'s gradient. Sums over ranks are exact.
double gradient_of(int rank, int parameter, int step) {
  return rank * 100 + parameter + step * 1000;
}

void mark(Reducer& reducer, int rank, int parameter, int step) {
  const Parameter& p = reducer.parameters()[static_cast<size_t>(parameter)];
  const double value = gradient_of(rank, parameter, step);
  if (p.dtype == DType::float64) {
    const std::vector<double> gradient(p.count, value);
    reducer.mark_ready(parameter, reinterpret_cast<const std::byte*>(gradient.data()));
  } else {
    const std::vector<float> gradient(p.count, static_cast<float>(value));
    reducer.mark_ready(parameter, reinterpret_cast<const std::byte*>(gradient.data()));
  }
}

template <typename T>
bool all_are(const std::byte* data, size_t count, double value) {
  const T* begin = reinterpret_cast<const T*>(data);
  return std::all_of(begin, begin + count, [&](T x) { return x == static_cast<T>(value); });
}

/// True if all the parameter's elements in its bucket are `value`.
bool holds(Reducer& reducer, int parameter, double value) {
  for (size_t b = 0; b < reducer.buckets().size(); ++b)
    for (const Placement& item : reducer.buckets()[b].placements) {
      if (item.parameter != parameter) continue;
      const DType dtype = reducer.buckets()[b].dtype;
      const std::byte* at = reducer.memory(b).get() + item.offset * size_of(dtype);
      return dtype == DType::float64 ? all_are<double>(at, item.count, value)
                                     : all_are<float>(at, item.count, value);
    }
  return false;
}

}  // namespace

TEST(reducer_takes_gradients_of_many_threads_in_any_order) {
  for (const bool overlap : {true, false})
    run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
      Reducer reducer(group, model(), small_buckets(overlap));
      const int count = static_cast<int>(reducer.parameters().size());
      const auto seed = static_cast<uint64_t>(group->rank() + (overlap ? 10 : 20));
      const testing::Note note("seed ", seed);
      std::mt19937_64 random(seed);
      for (int step = 0; step < 5; ++step) {
        std::vector<int> order(static_cast<size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::shuffle(order, random);
        std::vector<std::thread> hooks;
        for (size_t t = 0; t < 3; ++t)
          hooks.emplace_back([&, t] {
            for (size_t i = t; i < order.size(); i += 3)
              mark(reducer, group->rank(), order[i], step);
          });
        for (std::thread& hook : hooks) hook.join();
        CHECK(reducer.wait(testing::patience()));
        for (int p = 0; p < count; ++p) {
          double sum = 0;
          for (int r = 0; r < kRanksThatReduce; ++r) sum += gradient_of(r, p, step);
          CHECK(holds(reducer, p, sum));
          CHECK(reducer.used(p));
        }
      }
    });
}

TEST(reducer_reduces_large_gradients_where_they_lie) {
  run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    ReducerOptions options = small_buckets(true);
    options.limits.alone_bytes = 4000;
    options.prescale = 2;
    Reducer reducer(group, model(), options);
    const int count = static_cast<int>(reducer.parameters().size());
    int alone = 0;
    for (int step = 0; step < 4; ++step) {
      // By p + step + rank: one rank does not use parameter p, the next one copies its gradient in,
      // and the last one lends it if its bucket is reduced in place.
      std::vector<std::shared_ptr<std::vector<double>>> lent(static_cast<size_t>(count));
      for (int p = count - 1; p >= 0; --p) {
        const int turn = (p + step + group->rank()) % kRanksThatReduce;
        const Parameter& parameter = reducer.parameters()[static_cast<size_t>(p)];
        if (turn == 0) continue;
        if (turn == 1 || !reducer.in_place(p) || parameter.dtype != DType::float64) {
          mark(reducer, group->rank(), p, step);
          continue;
        }
        ++alone;
        auto& gradient = lent[static_cast<size_t>(p)];
        gradient = std::make_shared<std::vector<double>>(parameter.count,
                                                         gradient_of(group->rank(), p, step));
        reducer.lend(p, reinterpret_cast<std::byte*>(gradient->data()), gradient);
      }
      CHECK(reducer.wait(testing::patience()));
      for (int p = 0; p < count; ++p) {
        double sum = 0;
        for (int r = 0; r < kRanksThatReduce; ++r)
          if ((p + step + r) % kRanksThatReduce != 0) sum += 2 * gradient_of(r, p, step);
        if (const auto& gradient = lent[static_cast<size_t>(p)])
          CHECK(all_are<double>(reinterpret_cast<const std::byte*>(gradient->data()),
                                gradient->size(), sum));
        else
          CHECK(holds(reducer, p, sum));
      }
    }
    CHECK(alone > 0);
    std::vector<float> small(1);
    CHECK_THROWS(reducer.lend(0, reinterpret_cast<std::byte*>(small.data()), group), Error,
                 e.code() == ErrorCode::invalid_argument);
  });
}

TEST(reducer_counts_what_a_rank_did_not_use_as_zeros) {
  run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    Reducer reducer(group, model(), small_buckets(true));
    const int count = static_cast<int>(reducer.parameters().size());
    for (int step = 0; step < 3; ++step) {
      // No rank uses parameter 3. One rank, which changes with the step, does not use parameter p.
      const auto uses = [&](int rank, int p) {
        return p != 3 && (p + step) % kRanksThatReduce != rank;
      };
      for (int p = count - 1; p >= 0; --p)
        if (uses(group->rank(), p)) mark(reducer, group->rank(), p, step);
      CHECK(reducer.wait(testing::patience()));
      for (int p = 0; p < count; ++p) {
        double sum = 0;
        for (int r = 0; r < kRanksThatReduce; ++r)
          if (uses(r, p)) sum += gradient_of(r, p, step);
        CHECK(holds(reducer, p, sum));
        CHECK_EQUAL(reducer.used(p), p != 3);
      }
    }
  });
}

TEST(reducer_tells_everybody_who_abandoned_a_step_and_goes_on) {
  run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    Reducer reducer(group, model(), small_buckets(true));
    const int count = static_cast<int>(reducer.parameters().size());
    for (int step = 0; step < 4; ++step) {
      const int quitter = step % 2 == 0 ? kNobody : step % kRanksThatReduce;
      for (int p = 0; p < count; ++p) {
        if (group->rank() == quitter && p == 5) break;  // an exception in backward
        mark(reducer, group->rank(), p, step);
      }
      if (quitter == kNobody) {
        CHECK(reducer.wait(testing::patience()));
        for (int p = 0; p < count; ++p)
          CHECK(holds(reducer, p,
                      gradient_of(0, p, step) + gradient_of(1, p, step) + gradient_of(2, p, step)));
      } else if (group->rank() == quitter) {
        reducer.abandon();
        if (reducer.step_open())  // abandon() does not wait: the step ends with the next wait
          CHECK_THROWS(reducer.wait(testing::patience()), Error,
                       e.code() == ErrorCode::remote_error && e.where().rank == quitter);
      } else {
        CHECK_THROWS(reducer.wait(testing::patience()), Error,
                     e.code() == ErrorCode::remote_error && e.where().rank == quitter);
      }
      CHECK(!reducer.step_open());
    }
  });
}

TEST(reducer_refuses_a_gradient_that_comes_twice) {
  run_groups(1, ProgressMode::caller, [&](const std::shared_ptr<Group>& group) {
    Reducer reducer(group, model(), small_buckets(true));
    mark(reducer, 0, 4, 0);
    CHECK_THROWS(mark(reducer, 0, 4, 0), Error, e.code() == ErrorCode::invalid_argument);
    CHECK(reducer.wait(testing::patience()));
    CHECK(reducer.used(4) && !reducer.used(5));
  });
}

TEST(reducer_plans_in_the_order_of_the_first_step_that_all_ranks_complete) {
  std::array<uint64_t, kRanksThatReduce> plans{};
  run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    const int rank = group->rank();
    Reducer reducer(group, model(), small_buckets(true));
    const int count = static_cast<int>(reducer.parameters().size());
    const size_t room = group->engine()->arena()->bytes_in_use();
    const auto step = [&](int number, int skipped) {
      for (int p = count - 1; p >= 0; --p)  // far from the plan's order
        if (p != skipped) mark(reducer, rank, p, number);
    };
    // A rank abandons the first step half-way, so that step gives no order.
    mark(reducer, rank, 3, 0);
    if (rank == 1) reducer.abandon();
    CHECK_THROWS(reducer.wait(testing::patience()), Error,
                 e.code() == ErrorCode::remote_error && e.where().rank == 1);
    CHECK(!reducer.has_better_plan());
    // Rank 2 does not use the parameter that is ready second, so that one goes last.
    const int unused = count - 2;
    step(1, rank == 2 ? unused : -1);
    CHECK(reducer.wait(testing::patience()));
    CHECK(reducer.has_better_plan());
    const std::shared_ptr<std::byte> old = reducer.memory(0);
    mark(reducer, rank, 0, 2);
    CHECK_THROWS(reducer.take_better_plan(), Error, e.code() == ErrorCode::invalid_argument);
    CHECK(reducer.drain(testing::patience()));
    reducer.take_better_plan();
    CHECK(!reducer.has_better_plan());
    plans[static_cast<size_t>(rank)] = fingerprint(reducer.parameters(), reducer.buckets());
    CHECK_EQUAL(reducer.buckets().front().placements.front().parameter, count - 1);
    CHECK_EQUAL(reducer.buckets().back().placements.back().parameter, unused);
    CHECK(reducer.memory(0) != old && old.use_count() == 1);
    for (int number = 3; number < 6; ++number) {
      step(number, -1);
      CHECK(reducer.wait(testing::patience()));
      for (int p = 0; p < count; ++p)
        CHECK(holds(
            reducer, p,
            gradient_of(0, p, number) + gradient_of(1, p, number) + gradient_of(2, p, number)));
      CHECK(!reducer.has_better_plan());
    }
    // The arena may grow by one page per bucket, and one for the old bucket, which is held here.
    const size_t page = 4096;
    CHECK(group->engine()->arena()->bytes_in_use() <= room + page * (reducer.buckets().size() + 1));
  });
  CHECK_EQUAL(plans[1], plans[0]);
  CHECK_EQUAL(plans[2], plans[0]);
}

TEST(reducer_keeps_a_plan_that_fits_the_order) {
  run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    Reducer reducer(group, model(), small_buckets(true));
    const int count = static_cast<int>(reducer.parameters().size());
    for (int step = 0; step < 2; ++step) {
      for (int p = 0; p < count; ++p) mark(reducer, group->rank(), p, step);
      CHECK(reducer.wait(testing::patience()));
      CHECK(!reducer.has_better_plan());
    }
    Reducer nothing(group, {}, small_buckets(true));
    CHECK(nothing.wait(testing::patience()));
    CHECK(!nothing.has_better_plan());
  });
}

TEST(reducer_launches_a_group_when_all_of_it_is_ready) {
  run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    std::vector<Parameter> parameters = model();
    for (const size_t p : {0u, 4u, 7u}) parameters[p].group = 1;  // of two dtypes
    ReducerOptions options = small_buckets(true);
    options.limits.bytes = 0;
    Reducer reducer(group, std::move(parameters), options);
    CHECK_EQUAL(end_of_launch(reducer.buckets(), reducer.places()[0].bucket),
                reducer.places()[4].bucket + 1);
    const int rank = group->rank(), count = static_cast<int>(reducer.parameters().size());
    for (int step = 0; step < 3; ++step) {
      for (int p = 0; p < count; ++p)
        if (p != 4) mark(reducer, rank, p, step);
      CHECK(group->submit({}, {}, {{Collective::barrier}}).wait(testing::patience()));
      // Its bucket is complete on all ranks, and has not been launched.
      CHECK(holds(reducer, 0, gradient_of(rank, 0, step)));
      mark(reducer, rank, 4, step);
      CHECK(reducer.wait(testing::patience()));
      for (int p = 0; p < count; ++p)
        CHECK(holds(reducer, p,
                    gradient_of(0, p, step) + gradient_of(1, p, step) + gradient_of(2, p, step)));
    }
  });
}

TEST(reducer_takes_the_room_of_sparse_gradients_back) {
  run_groups(kRanksThatReduce, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    constexpr int kSparse = 6;
    Reducer reducer(group, model(), small_buckets(true));
    const int rank = group->rank(), count = static_cast<int>(reducer.parameters().size());
    const auto step = [&](int number, int sparse_dims) {
      for (int p = 0; p < count; ++p) {
        const size_t room = reducer.parameters()[static_cast<size_t>(p)].count;
        const std::vector<float> gradient(room, static_cast<float>(rank + 1));
        if (p == kSparse)
          reducer.mark_ready(p, reinterpret_cast<const std::byte*>(gradient.data()), sparse_dims);
        else
          mark(reducer, rank, p, number);
      }
      return reducer.wait(testing::patience());
    };
    // Sparse on some ranks and dense on others: an error on each, and nothing changes.
    CHECK_THROWS(step(0, rank == 1 ? 0 : 2), Error,
                 e.code() == ErrorCode::mismatch && e.where().field == "layout of 'layer 6'");
    CHECK(!reducer.has_better_plan() && reducer.left_out()[kSparse] == 0);
    CHECK(step(1, 2));
    CHECK(holds(reducer, kSparse, 1 + 2 + 3));
    CHECK(reducer.has_better_plan());
    CHECK_EQUAL(reducer.left_out()[kSparse], 2);
    reducer.take_better_plan();
    CHECK_EQUAL(reducer.parameters()[kSparse].count, size_t{0});
    for (int number = 2; number < 4; ++number) {
      CHECK(step(number, 2));
      CHECK(reducer.used(kSparse) && !reducer.has_better_plan());
      for (int p = 0; p < count; ++p) {
        if (p == kSparse) continue;
        double sum = 0;
        for (int r = 0; r < kRanksThatReduce; ++r) sum += gradient_of(r, p, number);
        CHECK(holds(reducer, p, sum));
      }
    }
    CHECK_THROWS(step(4, 0), Error, e.code() == ErrorCode::invalid_argument);
    CHECK_THROWS(step(5, rank), Error, e.code() == ErrorCode::mismatch);
    CHECK(step(6, 2));
  });
}
