// All-to-all: a block from every rank for every other.
//
//   direct   in turn k a rank exchanges with those k to its right and left, so that no rank is ever
//            the target of two: every block crosses once, and every pair has a message
//   bruck    blocks hop: in the round for bit b all whose way to the right has that bit go 2^b
//            ranks further, in one message; half of the blocks each round, but log2(size) messages
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// Blocks of [1, size) whose way has `bit`.
int hopping(int size, int bit) {
  int blocks = 0;
  for (int way = 1; way < size; ++way) blocks += (way & bit) != 0;
  return blocks;
}

}  // namespace

Schedule direct_all_to_all(const Shape& shape) {
  const int me = shape.rank, size = shape.size;
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    for (int k = 0; k < size; ++k) {  // first the block for itself
      const int to = (me + k) % size, from = (me + size - k) % size;
      add(lane, {.to = to,
                 .send = part(block_sent(shape, me, to), shape.lanes, l),
                 .from = from,
                 .recv = part(block_received(shape, from, me), shape.lanes, l)});
    }
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// Bruck et al. 1997. A round's blocks are packed into one row, and arrive as a row of their own:
/// `lies[way]` is where the block with that way to go, or that has come so far, lies now. For small
/// blocks, so in one lane, whatever the shape says.
Schedule bruck_all_to_all(const Shape& shape) {
  const int me = shape.rank, size = shape.size;
  const size_t count = shape.count;
  Schedule schedule{.lanes = {Lane{}}};
  Lane& lane = schedule.lanes.front();
  const auto copy = [&](Slice from, Slice into) {
    add(lane, {.to = me, .send = from, .from = me, .recv = into});
  };
  std::vector<Slice> lies;
  for (int way = 0; way < size; ++way) lies.push_back(block_sent(shape, me, (me + way) % size));
  const auto row = [&](int blocks) {
    const Slice whole{Space::scratch, schedule.scratch, static_cast<size_t>(blocks) * count};
    schedule.scratch += whole.count;
    return whole;
  };
  const Slice pack = row(size / 2);
  for (int bit = 1; bit < size; bit *= 2) {
    const Slice arriving = row(hopping(size, bit));
    Slice packed = in(Space::scratch, pack);
    packed.count = 0;
    for (int way = bit; way < size; ++way) {
      if ((way & bit) == 0) continue;
      copy(lies[static_cast<size_t>(way)], {Space::scratch, pack.offset + packed.count, count});
      lies[static_cast<size_t>(way)] = {Space::scratch, arriving.offset + packed.count, count};
      packed.count += count;
    }
    add(lane, {.to = (me + bit) % size,
               .send = packed,
               .from = (me + size - bit) % size,
               .recv = arriving});
  }
  for (int way = 0; way < size; ++way)
    copy(lies[static_cast<size_t>(way)], block_received(shape, (me + size - way) % size, me));
  return schedule;
}

Cost direct_all_to_all_cost(const Shape& shape) {
  const double others = shape.size - 1;
  const auto block = static_cast<double>(largest_share(Collective::all_to_all, shape));
  return {.rounds = others, .bytes = others * block};
}

/// Packing and unpacking cost about as much as folding the same data.
Cost bruck_all_to_all_cost(const Shape& shape) {
  double blocks = 0;
  for (int bit = 1; bit < shape.size; bit *= 2) blocks += hopping(shape.size, bit);
  const auto block = static_cast<double>(shape.count);
  return {.rounds = static_cast<double>(ceil_log2(shape.size)),
          .bytes = blocks * block,
          .folds = (blocks + shape.size) * block};
}

}  // namespace farandole
