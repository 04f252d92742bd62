// Every planner's schedules on the device's interpreter, against the processor's folds.
#include "cases.h"
#include "check.h"
#include "schedule/slicing.h"

namespace farandole::cuda {
namespace {

constexpr uint32_t kSlot = 64;  // bytes: steps take many rounds
constexpr int kTimes = 2;       // one behind the other: counts go on where they were

struct LaneCase {
  const Planner& planner;
  Shape shape;
  DType dtype;
  ReduceOp op;
  uint32_t grain = 1;
};

/// One rank of a schedule, with its memory.
struct Rank {
  LaneTable table;
  std::vector<Array> input, output, scratch;  // one each
  std::unique_ptr<LaneFlags> flags = std::make_unique<LaneFlags>();
  std::unique_ptr<Pack[]> mailbox{};
};

Shape of_rank(Shape shape, uint32_t rank) {
  shape.rank = static_cast<int>(rank);
  return shape;
}

/// The expected output of a rank, from the table of collectives.
Bytes expected_of(const LaneCase& now, std::span<const Bytes> inputs, uint32_t rank,
                  const Folding& folding) {
  const Shape shape = of_rank(now.shape, rank);
  const size_t element = size_of(now.dtype),
               outputs = sizes_of(now.planner.collective, shape).output;
  const auto slice = [&](const Bytes& of, const Slice& s) {
    const auto* begin = of.data() + s.offset * element;
    return Bytes(begin, begin + s.count * element);
  };
  Bytes out;
  switch (now.planner.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
      return outputs > 0 ? folded(inputs, folding) : Bytes{};
    case Collective::reduce_scatter:
      return slice(folded(inputs, folding),
                   share_of(Collective::reduce_scatter, shape, shape.rank));
    case Collective::broadcast:
      return inputs[static_cast<size_t>(shape.root)];
    case Collective::scatter:
      return slice(inputs[static_cast<size_t>(shape.root)],
                   share_of(Collective::scatter, shape, shape.rank));
    case Collective::all_gather:
    case Collective::gather:
      for (const Bytes& input : inputs)
        if (outputs > 0) out.insert(out.end(), input.begin(), input.end());
      return out;
    case Collective::all_to_all:
      for (size_t from = 0; from < inputs.size(); ++from) {
        const Bytes block =
            slice(inputs[from], block_sent(shape, static_cast<int>(from), shape.rank));
        out.insert(out.end(), block.begin(), block.end());
      }
      return out;
    default:
      return out;
  }
}

void run_case(const LaneCase& now, uint64_t seed) {
  const auto size = static_cast<uint32_t>(now.shape.size);
  const size_t element = size_of(now.dtype);
  const Folding folding{now.dtype, now.op, scales_for(now.dtype, now.op, 0.5, 1, now.shape.size)};
  std::vector<Rank> ranks(size);
  std::vector<Bytes> inputs;
  for (uint32_t r = 0; r < size; ++r) {
    Rank& me = ranks[r];
    const Shape shape = of_rank(now.shape, r);
    const Sizes sizes = sizes_of(now.planner.collective, shape);
    inputs.push_back(some_elements(now.dtype, sizes.input, seed * 100 + r));
    me.table =
        lanes_of({.planner = std::string(now.planner.name),
                  .kind = now.planner.collective,
                  .count = shape.count,
                  .root = shape.root,
                  .lanes = shape.lanes,
                  .segments = shape.segments,
                  .grain = counts_of(now.planner.collective, shape.size) == 0 ? now.grain : 1},
                 r, size);
    me.input.emplace_back(now.dtype, inputs.back());
    me.output.emplace_back(now.dtype, sizes.output);
    me.scratch.emplace_back(now.dtype, me.table.scratch);
    me.mailbox = std::make_unique_for_overwrite<Pack[]>(
        lane_mailbox_bytes(me.table.lanes(), size, kSlot) / sizeof(Pack));
  }
  Ranks meeting(size);
  std::vector<Stream> streams(size);
  for (uint32_t r = 0; r < size; ++r) {
    Rank& me = ranks[r];
    Lanes lanes{.peers = meeting.peers(r),
                .formula = row(now.op).formula,
                .slot_bytes = kSlot,
                .steps = me.table.steps.data(),
                .first = me.table.first.data(),
                .spaces = {me.input[0].data(), me.output[0].data(), me.scratch[0].data()},
                .leaf = scaling_of(folding.scales.leaf),
                .finish = scaling_of(folding.scales.finish)};
    for (uint32_t other = 0; other < size; ++other) {
      lanes.flags[other] = ranks[other].flags.get();
      lanes.mailboxes[other] = ranks[other].mailbox.get();
    }
    for (int time = 0; time < kTimes; ++time)
      streams[r].push_back(launch_of(kernel_name("lanes", now.dtype), lanes, me.table.lanes(), 4));
  }
  run_together(streams, seed);
  for (uint32_t r = 0; r < size; ++r) {
    const testing::Note note("rank ", r);
    CHECK(ranks[r].output[0].bytes() == expected_of(now, inputs, r, folding));
    CHECK(ranks[r].input[0].bytes() == inputs[r]);
    CHECK(ranks[r].output[0].surroundings_are_intact());
    CHECK(element > 0 && ranks[r].scratch[0].surroundings_are_intact());
  }
}

TEST(cuda_lanes_run_the_schedules_of_every_planner) {
  uint64_t seed = 0;
  for (const Planner& planner : planners()) {
    if (planner.collective == Collective::barrier || is_between_two(planner.collective)) continue;
    for (const int size : {1, 2, 3, 4, 5, 8})
      for (const size_t count : {0, 1, 13, 150}) {
        const Shape shape{.size = size, .count = count, .lanes = 2, .root = size / 2};
        if (!planner.fits(shape)) continue;
        if (testing::kSanitizer && (count != 13 || size > 4)) continue;
        const testing::Note note(name_of(planner.collective), " ", planner.name, ", ", size,
                                 " ranks, ", count, " elements, seed ", ++seed);
        // Sums of integers have the same bits in any order.
        run_case({planner, shape, DType::int32, ReduceOp::min}, seed);
        run_case({planner, shape, DType::uint16, ReduceOp::product, 8}, seed);
        if (planner.order(shape) != Order::canonical) continue;
        run_case({planner, shape, DType::float32, ReduceOp::sum}, seed);
        run_case({planner, shape, DType::bfloat16, ReduceOp::mean, 8}, seed);
      }
  }
  CHECK(seed > (testing::kSanitizer ? 20 : 100));
}

/// Two ranks that send each other an element, in a lane.
struct Pair {
  Ranks meeting{2};
  LaneFlags flags[2]{};
  Pack mailboxes[2][4 * kSlot / sizeof(Pack)]{};
  LaneStep steps[2] = {
      {.to = 1, .from = 1, .recv_space = 1, .held_space = 1, .send_count = 1, .recv_count = 1},
      {.to = 0, .from = 0, .recv_space = 1, .held_space = 1, .send_count = 1, .recv_count = 1}};
  uint32_t first[2] = {0, 1};
  float input[2] = {1, 2}, output[2]{};

  Launch launch(uint32_t rank) {
    Lanes lanes{.peers = meeting.peers(rank),
                .slot_bytes = kSlot,
                .steps = &steps[rank],
                .first = first,
                .spaces = {&input[rank], &output[rank]},
                .leaf = {},
                .finish = {}};
    for (uint32_t r = 0; r < 2; ++r) {
      lanes.flags[r] = &flags[r];
      lanes.mailboxes[r] = mailboxes[r];
    }
    return launch_of("farandole_lanes_float32", lanes, 1, 4);
  }
};

TEST(cuda_lanes_have_room_for_the_scratch_of_every_planner) {
  constexpr uint64_t kShared = 1 << 16;
  for (const int size : {1, 2, 3, 5, 8, 13, 64}) {
    const auto ranks = static_cast<uint32_t>(size);
    const LaneRoom room = lane_room(2 * kShared, kShared, ranks, {.processors = 64});
    CHECK(room.piece_bytes % 128 == 0 && room.piece_bytes > kShared / 4);
    CHECK(room.slot_bytes(room.lanes, ranks) >= 256);
    CHECK(lane_mailbox_bytes(room.lanes, ranks, room.slot_bytes(room.lanes, ranks)) <=
          room.mailbox_bytes);
    CHECK(room.piece_bytes + room.scratch_bytes + room.mailbox_bytes <= 2 * kShared);
    for (const Planner& planner : planners())
      for (const int lanes : {1, static_cast<int>(room.lanes)})
        for (const int segments : {1, 3, 8}) {
          if (planner.collective == Collective::barrier) continue;
          const size_t count = room.piece_bytes / sizeof(uint64_t) - 1;
          const bool has_shares = planner.collective >= Collective::gather ||
                                  planner.collective == Collective::all_gather;
          for (int rank = 0; rank < size; rank += std::max(1, size / 3)) {
            const Shape shape{.rank = rank,
                              .size = size,
                              .count = has_shares ? count / 2 / ranks : count,
                              .lanes = lanes,
                              .segments = segments,
                              .root = size / 2};
            if (!planner.fits(shape)) continue;
            const testing::Note note(name_of(planner.collective), " ", planner.name, ", ", size,
                                     " ranks, ", lanes, " lanes");
            const LanesAsked asked{.planner = std::string(planner.name),
                                   .kind = planner.collective,
                                   .count = shape.count,
                                   .root = shape.root,
                                   .lanes = lanes,
                                   .segments = segments,
                                   .grain = counts_of(planner.collective, size) == 0 ? 2U : 1U};
            const LaneTable made = lanes_of(asked, static_cast<uint32_t>(rank), ranks);
            CHECK(made.scratch * sizeof(uint64_t) <= room.scratch_bytes);
            CHECK_EQUAL(made.lanes(), static_cast<uint32_t>(lanes));
            CHECK(std::span(made.steps).size_bytes() + std::span(made.first).size_bytes() <=
                  longest_lane_table(ranks));
          }
        }
  }
}

TEST(cuda_lanes_leave_half_of_a_device_to_others) {
  CHECK_EQUAL(lane_room(1 << 25, 1 << 24, 8, {.processors = 132}).lanes, 32U);
  CHECK_EQUAL(lane_room(1 << 25, 1 << 24, 8, {.processors = 132, .ranks_on_device = 8}).lanes, 16U);
  CHECK_EQUAL(lane_room(1 << 25, 1 << 24, 8, {.processors = 4}).lanes, 4U);
  CHECK_EQUAL(lane_room(1 << 25, 1 << 24, 8, {.processors = 1, .ranks_on_device = 8}).lanes, 1U);
  CHECK_EQUAL(lane_room(1 << 13, 1 << 12, 64, {.processors = 132}).lanes, 1U);
  CHECK_EQUAL(lane_room(1 << 25, 1 << 24, 8, {.processors = 132}).slot_bytes(32, 8), 16384U);
}

TEST(cuda_lanes_end_when_the_group_is_aborted) {
  Pair pair;
  pair.meeting.abort(1);
  run(pair.launch(0));
  CHECK_EQUAL(pair.flags[1].filled[0][0], 0U);  // it waited for a rank that did not come
  pair.meeting.peers(0).flags[0]->arrived[0][1] = 2;
  run(pair.launch(0));
  CHECK_EQUAL(pair.flags[1].filled[0][0], 1U);  // it sent, and waited for what never came
}

TEST(cuda_lanes_fill_no_mailbox_that_its_owner_still_uses) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const testing::Note note("seed ", seed);
    Pair pair;
    Pack kept[4 * kSlot / sizeof(Pack)];
    Piece piece{.from = pair.mailboxes[1], .to = kept, .count = sizeof kept};
    const Pieces before = pieces_of({&piece, 1}, &piece, Scale{});
    std::vector<Stream> streams(2);
    streams[0].push_back(pair.launch(0));
    for (int i = 0; i < 20; ++i)  // rank 1 is late
      streams[1].push_back(launch_of("farandole_copy_uint8", before, 1, 4));
    streams[1].push_back(pair.launch(1));
    run_together(streams, seed);
    CHECK_EQUAL(kept[0].words[0], 0U);
    CHECK(pair.output[0] == 2 && pair.output[1] == 1);
  }
}

}  // namespace
}  // namespace farandole::cuda
