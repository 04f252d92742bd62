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
};

/// One rank of a schedule, with its memory.
struct Rank {
  Schedule schedule;
  LaneTable table;
  std::vector<Array> input, output, scratch;  // one each
  std::unique_ptr<LaneFlags> flags = std::make_unique<LaneFlags>();
  std::unique_ptr<Pack[]> mailbox{};
};

Shape of_rank(Shape shape, uint32_t rank) {
  shape.rank = static_cast<int>(rank);
  return shape;
}

/// What each rank is left with, from the table of collectives.
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
    me.schedule = now.planner.plan(shape);
    me.table = lanes_of(me.schedule);
    me.input.emplace_back(now.dtype, inputs.back());
    me.output.emplace_back(now.dtype, sizes.output);
    me.scratch.emplace_back(now.dtype, me.schedule.scratch);
    me.mailbox = std::make_unique_for_overwrite<Pack[]>(
        lane_mailbox_bytes(std::max(1U, me.table.lanes()), size, kSlot) / sizeof(Pack));
  }
  const uint32_t abort = 0;
  std::vector<Stream> streams(size);
  for (uint32_t r = 0; r < size; ++r) {
    Rank& me = ranks[r];
    if (me.table.lanes() == 0) continue;
    Lanes lanes{.rank = r,
                .size = size,
                .formula = row(now.op).formula,
                .slot_bytes = kSlot,
                .abort = &abort,
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
        run_case({planner, shape, DType::uint16, ReduceOp::product}, seed);
        if (planner.order(shape) != Order::canonical) continue;
        run_case({planner, shape, DType::float32, ReduceOp::sum}, seed);
        run_case({planner, shape, DType::bfloat16, ReduceOp::mean}, seed);
      }
  }
  CHECK(seed > (testing::kSanitizer ? 20 : 100));
}

TEST(cuda_lanes_end_when_the_group_is_aborted) {
  const uint32_t abort = 1;
  LaneFlags flags{}, others{};
  Pack mailbox[4 * kSlot / sizeof(Pack)];
  const LaneStep step{.to = 1, .from = 1, .send_count = 1, .recv_count = 1};
  const uint32_t first[] = {0, 1};
  float memory[2] = {};
  Lanes lanes{.size = 2,
              .slot_bytes = kSlot,
              .abort = &abort,
              .steps = &step,
              .first = first,
              .spaces = {memory, memory + 1},
              .leaf = {},
              .finish = {}};
  for (uint32_t r = 0; r < 2; ++r) {
    lanes.flags[r] = r == 0 ? &flags : &others;
    lanes.mailboxes[r] = mailbox;
  }
  run(launch_of("farandole_lanes_float32", lanes, 1, 4));
  CHECK_EQUAL(others.filled[0][0], 1U);  // it sent, and waited for what never came
}

}  // namespace
}  // namespace farandole::cuda
