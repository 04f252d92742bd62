// Operations by name from several threads of several ranks.
#include "named/named.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "engines.h"
#include "fold/neutral.h"
#include "group/pack.h"
#include "named/negotiation_messages.h"

using namespace farandole;
using testing::buffer_of;
using testing::patience;

namespace {

/// One all-reduce of `data` by name.
NamedRequest* submit(Named& named, std::string_view name, std::vector<int32_t>& data,
                     std::string_view note = "") {
  const Buffer buffer = buffer_of(data, DType::int32);
  const int64_t shape[] = {static_cast<int64_t>(data.size())};
  const NamedTensor tensor{{buffer, buffer}, shape};
  NamedCall call{{Collective::all_reduce}};
  call.name = name;
  call.note = note;
  call.tensors = {&tensor, 1};
  return named.submit(call);
}

/// The barrier that opens a call of "a" and "b".
NamedRequest* open_call(Named& named) {
  NamedCall call{{Collective::all_reduce}};
  call.kind = Collective::barrier;
  call.name = "call";
  call.note = "a\nb";
  return named.submit(call);
}

/// Waits and gives back; the error's text, or nothing.
std::string end_of(Named& named, NamedRequest* request) {
  if (!named.wait(*request, patience())) testing::fail(__FILE__, __LINE__, "it does not end");
  const std::string error = request->error ? request->error->what() : "";
  named.release(request);
  return error;
}

/// An all-reduce that nobody waits for; `then` is done when it has ended.
class Unattended : public NamedListener {
 public:
  Unattended(Named& named, std::string_view name, std::function<void()> then)
      : named_(named), then_(std::move(then)) {
    const Buffer buffer = buffer_of(data_, DType::int32);
    const int64_t shape[] = {static_cast<int64_t>(data_.size())};
    const NamedTensor tensor{{buffer, buffer}, shape};
    NamedCall call{{Collective::all_reduce}};
    call.name = name;
    call.tensors = {&tensor, 1};
    call.listener = this;
    call.waits = false;
    named.submit(call);
  }
  std::byte* make_room(size_t, std::span<const int64_t>) override { return nullptr; }
  void finished(NamedRequest& request) override {
    if (request.error) testing::fail(__FILE__, __LINE__, request.error->what());
    named_.release(&request);
    then_();
    ended_.store(true);
  }
  void expect_end(int sum) const {
    const Deadline until = patience();
    while (!ended_.load() && !until.passed(now())) std::this_thread::yield();
    CHECK(ended_.load());
    for (const int32_t x : data_) CHECK_EQUAL(x, sum);
  }

 private:
  Named& named_;
  std::function<void()> then_;
  std::vector<int32_t> data_ = std::vector<int32_t>(1000, 1);
  std::atomic<bool> ended_{false};
};

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

/// Rank 0 of two orders "a" well, then "b" in a message that is malformed, for the rank that has
/// `submitted` both.
void order_wrongly(Group& world, const std::atomic<bool>& submitted, const Deadline& until) {
  const Connect connect = world.engine()->options().channels(
      *world.engine(), world.membership(), stream_key(world.membership().key, kNegotiationNumber));
  MessageLink link(connect(1, 1));
  while (!submitted.load() && !until.passed(now())) std::this_thread::yield();
  WireWriter order;
  put_message(order, OrderedHead{1, true});
  put_tagged<OrderedAgreed>(order, Reference{false, 0}, kNoId, std::vector<int64_t>{});
  put_tagged<OrderedAgreed>(order, Reference{false, 1}, kNoId, std::vector<int64_t>{7});
  link.send(order.take());
  const auto failed = [&] { return world.membership().detector->failed(); };
  while (!failed() && !until.passed(now())) link.poll();
  CHECK(failed());
}

}  // namespace

TEST(what_was_ordered_before_a_malformed_order_ends_with_it) {
  std::atomic<bool> submitted{false};
  testing::run_groups(2, ProgressMode::thread, [&](const std::shared_ptr<Group>& group) {
    if (group->rank() == 0) return order_wrongly(*group, submitted, patience());
    const auto named = Named::open(*group, {});
    std::vector<int32_t> a(10, 1), b(10, 1);
    NamedRequest* const requests[] = {submit(*named, "a", a), submit(*named, "b", b)};
    submitted.store(true);
    for (NamedRequest* const request : requests)
      CHECK_EQUAL(end_of(*named, request).find("an order of names from rank 0 is malformed"), 0U);
  });
}

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

// Each rank submits what the other waits for when "a" has ended, while another one is in flight.
TEST(ends_are_told_while_others_are_in_flight) {
  for (const ProgressMode mode : {ProgressMode::thread, ProgressMode::automatic})
    testing::run_groups(2, mode, [&](const std::shared_ptr<Group>& group) {
      const auto named = Named::open(*group, {});
      const bool first = group->rank() == 0;
      std::unique_ptr<Unattended> later;
      const Unattended early(*named, first ? "b" : "c", [] {});
      const Unattended a(*named, "a", [&] {
        later = std::make_unique<Unattended>(*named, first ? "c" : "b", [] {});
      });
      a.expect_end(2);
      early.expect_end(2);
      later->expect_end(2);
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

TEST(packs_look_ahead_over_other_types_and_keep_to_their_limits) {
  std::vector<Packable> order;
  for (const size_t bytes : {100, 40, 100, 40, 5000, 100, 40}) {
    Packable item{.spec = {Collective::all_reduce}};
    item.dtype = bytes == 40 ? DType::float64 : DType::float32;
    item.bytes = bytes;
    order.push_back(item);
  }
  order.push_back({.spec = {Collective::all_gather}});
  const auto operations = plan_packs(order, {.together = 250, .alone = 1000});
  const std::vector<std::vector<size_t>> expected{{0, 2}, {1, 3, 6}, {4}, {5}, {7}};
  CHECK(operations == expected);
  CHECK_EQUAL(plan_packs(order, {.together = 0, .alone = 1000}).size(), order.size());
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

// Each time another rank submits "a" alone and begins anew, while "b" waits on the others; in the
// last round all leave, each with something else.
TEST(what_is_left_of_a_call_is_refused_when_a_rank_begins_anew) {
  constexpr int ranks = 3;
  testing::run_groups(ranks, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    const auto named = Named::open(*group, {});
    std::vector<int32_t> a(10, 1), b(10, 1);
    const auto end_of_part = [&](std::string_view name, std::vector<int32_t>& data) {
      return end_of(*named, submit(*named, name, data, "call"));
    };
    for (int round = 0; round < 2 * ranks; ++round) {
      const int leaver = round % ranks;
      CHECK_EQUAL(end_of(*named, open_call(*named)), "");
      CHECK_EQUAL(end_of_part("a", a), "");
      if (group->rank() != leaver) {
        const std::string error = end_of_part("b", b);
        CHECK(error.find("'call' was abandoned half-way on rank") == 0);
        CHECK(error.find("never came from all ranks: 'b'") != std::string::npos);
      }
      CHECK_EQUAL(end_of(*named, open_call(*named)), "");
      CHECK_EQUAL(end_of_part("b", b), "");
      CHECK_EQUAL(end_of_part("a", a), "");
    }
    CHECK_EQUAL(end_of(*named, open_call(*named)), "");
    NamedRequest* const mine = submit(*named, group->rank() == 0 ? "a" : "b", a, "call");
    NamedRequest* const next = open_call(*named);
    CHECK(end_of(*named, mine).find("'call' was abandoned half-way on rank") == 0);
    CHECK_EQUAL(end_of(*named, next), "");
    named->flush(patience());
  });
}

// shutdown() says so at once, while the thread that drives may be in the middle of a turn.
TEST(a_rank_that_has_left_finds_the_memory_of_others_as_it_was) {
  auto hosts = hosts_in_process(2, testing::World::kArenaBytes);
  std::vector<std::shared_ptr<Group>> groups(2);
  testing::run_ranks(2, [&](int rank) {
    const auto index = static_cast<size_t>(rank);
    auto engine = std::make_shared<Engine>(std::move(hosts[index]),
                                           testing::engine_options(ProgressMode::caller));
    groups[index] = Group::world(std::move(engine), {}, patience());
    const auto named = Named::open(*groups[index], {});
    std::vector<int32_t> data(10, 1);
    CHECK_EQUAL(end_of(*named, submit(*named, "a", data)), "");
    named->flush(patience());
  });
  groups[0]->engine()->leave();
  groups[1].reset();
  groups[0]->engine()->driver().turn(std::chrono::milliseconds(1));
  const auto verdict = groups[0]->membership().detector->verdict();
  CHECK_EQUAL(verdict ? std::string(verdict->what()) : "", "");
}
