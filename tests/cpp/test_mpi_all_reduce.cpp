// MPI's own all-reduce: right results, what is refused, one communicator for each stream, and how
// it ends where ranks or MPI fail.
#include "backends/mpi_all_reduce.h"

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "backends/schedule_backend.h"
#include "engines.h"
#include "fake_mpi.h"
#include "transport/mpi_end.h"

using namespace farandole;
using testing::buffer_of;
using testing::error_of;
using testing::FakeMpi;
using testing::FakeMpiRank;

namespace {

std::shared_ptr<MpiPort> port_of(const std::shared_ptr<FakeMpi>& mpi, int rank) {
  return std::make_shared<MpiPort>(std::make_unique<FakeMpiRank>(mpi, rank), rank, mpi->size, 77,
                                   Key{});
}

/// Runs body(world group) on a thread per rank, with all data over MPI.
template <typename Body>
void run_over(const std::shared_ptr<FakeMpi>& mpi, Body body) {
  auto hosts = hosts_in_process(mpi->size, testing::World::kArenaBytes);
  testing::run_ranks(mpi->size, [&](int rank) {
    EngineOptions options;
    lay_mesh(options, {}, "mpi", port_of(mpi, rank));
    auto engine =
        std::make_shared<Engine>(std::move(hosts[static_cast<size_t>(rank)]), std::move(options));
    body(Group::world(std::move(engine), {}, testing::patience()));
  });
}

Options by_mpi(ReduceOp op = ReduceOp::sum, double prescale = 1, double postscale = 1) {
  Options options{{Collective::all_reduce, op, prescale, postscale}};
  options.algorithm = "mpi";
  options.level = Determinism::fast;
  return options;
}

/// Small numbers, of which every fold is exact.
std::vector<std::byte> leaf(DType dtype, size_t count, int rank) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  const auto fill = [&]<typename T>(T) {
    for (size_t i = 0; i < count; ++i) {
      const T value = static_cast<T>(1 + (i + static_cast<size_t>(rank)) % 3);
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
  };
  if (dtype == DType::float32) fill(float{});
  if (dtype == DType::float64) fill(double{});
  if (size_of(dtype) == 1) fill(uint8_t{});
  if (size_of(dtype) == 2) fill(uint16_t{});
  if (row(dtype).kind == DTypeKind::integer && size_of(dtype) == 4) fill(uint32_t{});
  if (row(dtype).kind == DTypeKind::integer && size_of(dtype) == 8) fill(uint64_t{});
  return bytes;
}

std::vector<std::byte> expected(const Options& o, DType dtype, size_t count, int size) {
  std::vector<std::vector<std::byte>> leaves;
  std::vector<const std::byte*> inputs;
  for (int r = 0; r < size; ++r) leaves.push_back(leaf(dtype, count, r));
  for (const auto& each : leaves) inputs.push_back(each.data());
  std::vector<std::byte> out(count * size_of(dtype));
  fold_canonical(out.data(), inputs, count, dtype, o.op,
                 scales_for(dtype, o.op, o.prescale, o.postscale, size));
  return out;
}

void check_one(Group& group, const Options& options, DType dtype, size_t count, bool in_place) {
  const testing::Note note(name_of(options.op), " of ", count, " x ", name_of(dtype),
                           in_place ? ", in place" : "");
  auto input = leaf(dtype, count, group.rank());
  std::vector<std::byte> apart(input.size());
  auto& output = in_place ? input : apart;
  const Handle handle =
      group.submit({input.data(), count, dtype}, {output.data(), count, dtype}, options);
  CHECK_EQUAL(error_of(handle), "");
  CHECK_EQUAL(std::string(group.last_way()), "mpi");
  CHECK(output == expected(options, dtype, count, group.size()));
  if (!in_place) CHECK(input == leaf(dtype, count, group.rank()));
}

bool is_offered(ReduceOp op, DType dtype) {
  return dtype != DType::int8 &&
         why_not_by_mpi({.kind = Collective::all_reduce, .op = op}, dtype, Determinism::fast, 1)
             .empty();
}

}  // namespace

TEST(mpi_all_reduce_of_every_dtype_and_operation) {
  for (const int size : {1, 2, 3}) {
    const auto mpi = std::make_shared<FakeMpi>(size);
    run_over(mpi, [&](const std::shared_ptr<Group>& group) {
      for (const DTypeRow& dtype : kDTypes)
        for (const ReduceOpRow& op : kReduceOps)
          for (const bool in_place : {false, true})
            if (is_offered(op.op, dtype.dtype))
              check_one(*group, by_mpi(op.op), dtype.dtype, 7, in_place);
    });
    CHECK(!mpi->mixed);
  }
}

TEST(mpi_all_reduce_of_every_length_scaled_and_not) {
  const auto mpi = std::make_shared<FakeMpi>(2);
  run_over(mpi, [&](const std::shared_ptr<Group>& group) {
    for (const size_t count : {0, 1, 7, 100'001})
      for (const bool in_place : {false, true})
        for (const Options& options :
             {by_mpi(), by_mpi(ReduceOp::sum, 2, 0.25), by_mpi(ReduceOp::mean, 1, 3),
              by_mpi(ReduceOp::product, 0.5, 1)}) {
          check_one(*group, options, DType::float64, count, in_place);
          check_one(*group, options, DType::int32, count, in_place);
        }
  });
  CHECK(std::ranges::all_of(mpi->reductions, [](const auto& each) {
    return each.second->complete && each.second->count > 0;
  }));
}

TEST(mpi_all_reduce_is_refused_in_words) {
  const auto why = [](Options o, DType dtype, Group& group) {
    std::vector<std::byte> data(64);
    const Buffer buffer{data.data(), 8, dtype};
    try {
      group.submit(buffer, buffer, std::move(o));
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::invalid_argument);
      return error.verdict();
    }
    return std::string("taken");
  };
  const auto has = [](const std::string& text, std::string_view words) {
    const testing::Note note(text);
    CHECK(text.find(words) != std::string::npos);
  };
  run_over(std::make_shared<FakeMpi>(2), [&](const std::shared_ptr<Group>& group) {
    Options canonical = by_mpi();
    canonical.level = Determinism::canonical;
    has(why(canonical, DType::int32, *group), "'canonical' promises bits");
    Options moves = by_mpi();
    moves.kind = Collective::broadcast;
    has(why(moves, DType::int32, *group), "not broadcast");
    has(why(by_mpi(), DType::float16, *group), "no float16");
    has(why(by_mpi(), DType::boolean, *group), "no bool");
    has(why(by_mpi(), DType::int8, *group), "this MPI has no sum of int8");
    has(why(by_mpi(ReduceOp::max), DType::float32, *group), "NaN in a max of float32");
    const auto all = group->split(0, -group->rank(), testing::patience());
    has(why(by_mpi(), DType::int32, *all), "another group");
  });
  has(why_not_by_mpi({.kind = Collective::all_reduce}, DType::uint8, Determinism::fast,
                     size_t{1} << 31),
      "2147483647 elements");
  testing::run_groups(2, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    has(why(by_mpi(), DType::int32, *group), "no data go over MPI here");
  });
}

TEST(mpi_all_reduce_of_each_stream_has_a_communicator_of_its_own) {
  const auto mpi = std::make_shared<FakeMpi>(2);
  run_over(mpi, [&](const std::shared_ptr<Group>& group) {
    const std::vector<std::shared_ptr<Stream>> streams = {
        group->program_order(), group->stream_of_names(), group->open_stream("buckets"),
        group->open_stream("more")};
    std::vector<testing::Sum> sums;
    for (size_t i = 0; i < 40; ++i) sums.emplace_back(group->rank(), group->size(), 1 + i * 97);
    std::vector<Handle> handles;
    for (size_t i = 0; i < sums.size(); ++i) {
      // Either rank has another order among the streams.
      const size_t at = i / 4 * 4 + (group->rank() == 0 ? i % 4 : 3 - i % 4);
      handles.push_back(
          group->submit_to(streams[at % 4], sums[at].buffer(), sums[at].buffer(), by_mpi()));
    }
    for (const Handle& handle : handles) CHECK_EQUAL(error_of(handle), "");
    for (const testing::Sum& sum : sums) CHECK(sum.is_right());
  });
  CHECK(!mpi->mixed);
  CHECK_EQUAL(mpi->duplicates[0], 5U);  // one that nobody has asked for is made on the way
}

TEST(mpi_all_reduce_ends_with_the_error_of_any_call) {
  for (const char* function :
       {"MPI_Comm_idup", "MPI_Comm_set_errhandler", "MPI_Iallreduce", "MPI_Test"}) {
    const testing::Note note(function);
    const auto mpi = std::make_shared<FakeMpi>(2);
    mpi->fails = function;
    run_over(mpi, [&](const std::shared_ptr<Group>& group) {
      testing::Sum sum(group->rank(), group->size(), 1000);
      const std::string error = error_of(group->submit(sum.buffer(), sum.buffer(), by_mpi()));
      CHECK(error.find(std::string(function) + " failed with code 7") != std::string::npos);
    });
  }
}

TEST(mpi_all_reduce_of_a_rank_that_never_comes_ends_without_mpi) {
  const auto mpi = std::make_shared<FakeMpi>(3);
  run_over(mpi, [&](const std::shared_ptr<Group>& group) {
    testing::Sum sum(group->rank(), group->size(), 1000);
    if (group->rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return group->abort(Error(ErrorCode::aborted, "loss is nan"));
    }
    const std::string error = error_of(group->submit(sum.buffer(), sum.buffer(), by_mpi()));
    CHECK(error.find("loss is nan") != std::string::npos);
    CHECK_EQUAL(sum.data[7], group->rank() + 1);
  });
  CHECK(mpi->reductions.empty());
}

// ---- what a port does where the world fails in between ----

namespace {

/// Ports of a few ranks, polled by one thread, with an all-reduce that all of them have in hand.
struct HalfBegun {
  explicit HalfBegun(int size)
      : mpi(std::make_shared<FakeMpi>(size)), data(static_cast<size_t>(size)) {
    for (int r = 0; r < size; ++r) {
      const auto index = static_cast<size_t>(r);
      ports.push_back(port_of(mpi, r));
      data[index].assign(1000, 1);
      auto* const at = reinterpret_cast<std::byte*>(data[index].data());
      reductions.push_back({.input = at, .output = at, .count = 1000, .dtype = DType::int32});
    }
    // One before it, so that the communicator is there.
    std::vector<MpiReduction> first = reductions;
    for (size_t ended = 0; ended < first.size();) {
      ended = 0;
      for (size_t r = 0; r < first.size(); ++r) ended += ports[r]->reduce(first[r]) ? 1 : 0;
    }
    for (auto& each : data) each.assign(1000, 1);
  }
  /// Until no rank's memory is held for now.
  std::vector<Held> let_go(Duration most = std::chrono::seconds(7)) {
    const Deadline until = Deadline::after(most);
    std::vector<Held> held(ports.size(), Held::for_now);
    while (std::ranges::count(held, Held::for_now) > 0 && !until.passed(now()))
      for (size_t r = 0; r < ports.size(); ++r) held[r] = ports[r]->let_go(reductions[r]);
    return held;
  }

  std::shared_ptr<FakeMpi> mpi;
  std::vector<std::shared_ptr<MpiPort>> ports;
  std::vector<std::vector<int32_t>> data;
  std::vector<MpiReduction> reductions;
};

}  // namespace

TEST(mpi_all_reduce_that_some_have_begun_is_ended_by_all) {
  HalfBegun all(5);
  CHECK(!all.ports[1]->reduce(all.reductions[1]));
  CHECK(all.let_go() == std::vector<Held>(5, Held::no));
  CHECK(!all.mpi->mixed);
  for (const auto& [at, reduction] : all.mpi->reductions) CHECK(reduction->complete);
  for (const size_t r : {0, 2, 3, 4}) {
    CHECK_EQUAL(all.data[r][0], 1);                   // who has not begun has its memory as it was
    CHECK(!all.ports[r]->reduce(all.reductions[r]));  // and begins nothing now
  }
  for (const auto& port : all.ports) port->close();
}

TEST(mpi_all_reduce_that_nobody_has_begun_is_begun_by_nobody) {
  HalfBegun all(3);
  const size_t before = all.mpi->reductions.size();
  CHECK(all.let_go() == std::vector<Held>(3, Held::no));
  CHECK_EQUAL(all.mpi->reductions.size(), before);
}

TEST(mpi_all_reduce_that_never_ends_keeps_its_memory) {
  HalfBegun all(2);
  CHECK(!all.ports[0]->reduce(all.reductions[0]));
  Held held = Held::for_now;
  const TimePoint begin = now();
  while (held == Held::for_now) held = all.ports[0]->let_go(all.reductions[0]);
  CHECK(held == Held::for_ever);
  CHECK(now() - begin >= MpiPort::kLongestHold);
  CHECK(has_memory_with_mpi());
  all.mpi->broken = true;  // it is called no more
  CHECK(all.ports[0]->let_go(all.reductions[0]) == Held::for_ever);
}

TEST(mpi_all_reduce_in_flight_at_a_death_keeps_its_memory) {
  HalfBegun all(2);
  CHECK(!all.ports[0]->reduce(all.reductions[0]));
  all.ports[0]->abandon("rank 1 has died");
  all.mpi->broken = true;  // a call would be an error at once
  CHECK(all.ports[0]->let_go(all.reductions[0]) == Held::for_ever);
  CHECK(all.ports[1]->let_go(all.reductions[1]) == Held::no);  // it has begun nothing
}

TEST(mpi_duplicates_stay_from_world_to_world) {
  CHECK(mpi_duplicates_of(5) == mpi_duplicates_of(5));
  CHECK(mpi_duplicates_of(5) != mpi_duplicates_of(6));
}

// ---- the choice ----

TEST(mpi_all_reduce_is_chosen_where_it_was_measured_to_be_quicker) {
  const auto mpi = std::make_shared<FakeMpi>(2);
  const auto way_of = [&](std::optional<MpiCosts> costs, Determinism level, size_t count) {
    std::vector<float> data(count);
    const Connect nowhere = [](int, int) { return nullptr; };
    MpiAllReduce backend(
        {.port = port_of(mpi, 0), .costs = costs}, 2,
        std::make_unique<ScheduleBackend>(ScheduleGroup{.size = 2, .host_of = {0, 1}}, nowhere,
                                          nullptr, kTcpCosts));
    Operation operation;
    operation.kind = Collective::all_reduce;
    operation.input = operation.output = buffer_of(data, DType::float32);
    operation.count = count;
    operation.level = level;
    CHECK(backend.can_run(operation));
    backend.start(operation, 1);
    return std::string(backend.way());
  };
  const MpiCosts late{.round = 1e-3, .byte = 1e-11}, slow{.round = 1e-9, .byte = 1e-8};
  CHECK_EQUAL(way_of(late, Determinism::fast, 1 << 22), "mpi");
  CHECK_EQUAL(way_of(late, Determinism::fast, 1 << 10), "schedule");
  CHECK_EQUAL(way_of(slow, Determinism::fast, 1 << 22), "schedule");
  CHECK_EQUAL(way_of(slow, Determinism::fast, 1), "mpi");
  CHECK_EQUAL(way_of(late, Determinism::canonical, 1 << 22), "schedule");
  CHECK_EQUAL(way_of(std::nullopt, Determinism::fast, 1 << 22), "schedule");
  CHECK(!MpiCosts{}.is_measured());
}
