// Operations by name from several threads of several ranks.
#include "fusion/named.h"

#include <algorithm>
#include <random>

#include "engines.h"
#include "fold/neutral.h"
#include "fusion/cut.h"

using namespace farandole;
using testing::buffer_of;
using testing::patience;

namespace {

/// One all-reduce of `data` by name.
NamedRequest* submit(Named& named, std::string_view name, std::vector<int32_t>& data) {
  const Buffer buffer = buffer_of(data, DType::int32);
  const int64_t shape[] = {static_cast<int64_t>(data.size())};
  const AskedTensor tensor{buffer, buffer, shape};
  Ask ask;
  ask.name = name;
  ask.tensors = {&tensor, 1};
  return named.submit(ask);
}

/// Waits and gives back; the error's text, or nothing.
std::string end_of(Named& named, NamedRequest* request) {
  if (!named.wait(*request, patience())) testing::fail(__FILE__, __LINE__, "it does not end");
  const std::string error = request->error ? request->error->what() : "";
  named.release(request);
  return error;
}

/// A thread's share: names of its own, in an order of its own.
void reduce_names(Named& named, int rank, int size, int thread, int steps) {
  std::mt19937 random(static_cast<unsigned>(rank * 100 + thread));
  for (int step = 0; step < steps; ++step) {
    std::vector<int> order(12);
    for (int i = 0; i < 12; ++i) order[static_cast<size_t>(i)] = i;
    std::ranges::shuffle(order, random);
    std::vector<std::vector<int32_t>> data(12);
    std::vector<NamedRequest*> requests(12);
    for (const int i : order) {
      const auto index = static_cast<size_t>(i);
      data[index].assign(static_cast<size_t>(1 + i * i * 700), rank + 1);
      requests[index] =
          submit(named, "x" + std::to_string(thread) + "." + std::to_string(i), data[index]);
    }
    for (size_t i = 0; i < 12; ++i) {
      CHECK_EQUAL(end_of(named, requests[i]), "");
      for (const int32_t x : data[i])
        if (x != size * (size + 1) / 2) {
          testing::fail(__FILE__, __LINE__, "a wrong sum");
          break;
        }
    }
  }
}

}  // namespace

TEST(names_from_several_threads_meet_in_any_order) {
  const int steps = testing::kThreadSanitizer ? 4 : 12;
  for (const ProgressMode mode : {ProgressMode::thread, ProgressMode::caller})
    testing::run_groups(3, mode, [&](const std::shared_ptr<Group>& group) {
      const auto named = Named::open(*group, {});
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t)
        threads.emplace_back(
            [&, t] { reduce_names(*named, group->rank(), group->size(), t, steps); });
      for (std::thread& thread : threads) thread.join();
      named->flush(patience());
    });
}

TEST(names_are_forgotten_and_come_again) {
  testing::run_groups(2, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    const auto named = Named::open(*group, {.fusion_bytes = 1 << 20, .ids = 3});
    for (int t = 0; t < 2; ++t) reduce_names(*named, group->rank(), group->size(), t, 3);
    named->flush(patience());
  });
}

TEST(a_name_in_flight_is_refused_and_abort_ends_the_rest) {
  testing::run_groups(2, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    const auto named = Named::open(*group, {});
    std::vector<int32_t> data(5, 1);
    if (group->rank() == 1) return;  // its end is seen as leaving
    NamedRequest* const request = submit(*named, "x", data);
    CHECK_THROWS(submit(*named, "x", data), Error,
                 std::string(e.what()).find("'x' is in flight already") != std::string::npos);
    group->abort(Error(ErrorCode::aborted, "enough"));
    CHECK(!end_of(*named, request).empty());
  });
}

TEST(a_cut_looks_ahead_over_other_types_and_keeps_to_its_limits) {
  std::vector<CutItem> order;
  for (const size_t bytes : {100, 40, 100, 40, 5000, 100, 40}) {
    CutItem item;
    item.dtype = bytes == 40 ? DType::float64 : DType::float32;
    item.bytes = bytes;
    order.push_back(item);
  }
  order.push_back({.kind = Collective::all_gather});
  const auto operations = cut(order, {.together = 250, .alone = 1000});
  const std::vector<std::vector<size_t>> expected{{0, 2}, {1, 3, 6}, {4}, {5}, {7}};
  CHECK(operations == expected);
  CHECK_EQUAL(cut(order, {.together = 0, .alone = 1000}).size(), order.size());
}

TEST(what_is_neutral_changes_nothing) {
  for (const DTypeRow& dtype : kDTypes)
    for (const ReduceOp op : {ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
      uint64_t bits[2] = {0x5555555555555555, 0x5555555555555555};
      auto* data = reinterpret_cast<std::byte*>(bits);
      fill_neutral(data, 1, dtype.dtype, op);
      const bool untouched = std::all_of(data + dtype.bytes, data + 16,
                                         [](std::byte b) { return b == std::byte{0x55}; });
      CHECK(untouched);
    }
}
