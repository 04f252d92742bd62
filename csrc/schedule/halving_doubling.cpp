// Halving and doubling (Rabenseifner), for every size in canonical order.
//
// The ranks are dealt into blocks as the size is written in binary, 13 = 8 + 4 + 1, which is how
// the canonical tree splits on its right side: A ⊕ (B ⊕ C).
//
//   reduce-scatter   each block by itself, neighbours first: after the exchange at distance d a
//   rank
//                    has half of what it had, folded over 2d ranks; at the end rank i of a block
//                    has piece(i), one block-size-th of the data folded over the block
//   cross            C's ranks send what they have to the ranks of B, B's to those of A, smallest
//                    block first. Piece j of a block is a union of pieces of any larger block,
//                    those of ranks i with i mod (block size) == j, because all cut alike
//   all-gather       all of it backwards
//
// The rounds are those of the largest block and one to cross, each way. No rank sends more than the
// data once each way. Segments would add rounds and hide nothing: a round needs all of the last.
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

struct Block {
  int begin = 0, size = 0;  // a power of two; 0: there is none
};

struct Place {
  Block larger, own, smaller;
};

Place place_of(const Shape& shape) {
  Place place;
  for (int begin = 0; begin < shape.size;) {
    const Block block{begin, 1 << floor_log2(shape.size - begin)};
    begin += block.size;
    if (begin <= shape.rank) {
      place.larger = block;
    } else if (place.own.size == 0) {
      place.own = block;
    } else {
      place.smaller = block;
      break;
    }
  }
  return place;
}

/// The piece of rank i of a block after `cuts` halvings: bit 0 of i picks a half, bit 1 a half of
/// that, and so on.
Slice piece(Slice data, int i, int cuts) {
  for (int bit = 0; bit < cuts; ++bit) data = part(data, 2, (i >> bit) & 1);
  return data;
}

class HalvingDoubling {
 public:
  HalvingDoubling(const Shape& shape, Slice data)
      : place_(place_of(shape)),
        index_(shape.rank - place_.own.begin),
        cuts_(floor_log2(place_.own.size)),
        data_(data) {}

  Lane run() {
    for (int bit = 0; bit < cuts_; ++bit) halve(bit);
    if (place_.smaller.size > 0) take_from_smaller();
    if (place_.larger.size > 0) cross_to_larger();
    if (place_.smaller.size > 0) give_to_smaller();
    for (int bit = cuts_ - 1; bit >= 0; --bit) gather(bit);
    return std::move(lane_);
  }

 private:
  Slice mine(int cuts) const { return piece(data_, index_, cuts); }
  int partner(int bit) const { return index_ ^ (1 << bit); }

  /// Output holds folds; before the first one, what this rank has is its input.
  Slice held(int folds, Slice slice) const {
    return in(folds == 0 ? Space::input : Space::output, slice);
  }

  void halve(int bit) {
    const bool first = bit == 0, last = bit == cuts_ - 1;
    const bool alone = place_.larger.size == 0 && place_.smaller.size == 0;
    const int peer = place_.own.begin + partner(bit);
    const Slice keep = mine(bit + 1), give = piece(data_, partner(bit), bit + 1);
    add(lane_, {.to = peer,
                .send = held(bit, give),
                .from = peer,
                .recv = keep,
                .held = held(bit, keep),
                .action = partner(bit) < index_ ? Action::fold_lower : Action::fold_upper,
                .leaf_arrived = first,
                .leaf_held = first,
                .finish = last && alone});
  }

  int in_smaller() const { return place_.smaller.begin + index_ % place_.smaller.size; }

  void take_from_smaller() {
    add(lane_, {.from = in_smaller(),
                .recv = mine(cuts_),
                .action = Action::fold_upper,
                .leaf_arrived = place_.smaller.size == 1,
                .finish = place_.larger.size == 0});
  }

  /// Sends its piece to the owners in the larger block and receives it back complete.
  void cross_to_larger() {
    const auto each_owner = [&](auto visit) {
      for (int i = index_; i < place_.larger.size; i += place_.own.size)
        visit(place_.larger.begin + i, piece(data_, i, floor_log2(place_.larger.size)));
    };
    each_owner(
        [&](int owner, Slice slice) { add(lane_, {.to = owner, .send = held(cuts_, slice)}); });
    each_owner([&](int owner, Slice slice) { add(lane_, {.from = owner, .recv = slice}); });
  }

  void give_to_smaller() { add(lane_, {.to = in_smaller(), .send = mine(cuts_)}); }

  void gather(int bit) {
    const int peer = place_.own.begin + partner(bit);
    add(lane_, {.to = peer,
                .send = mine(bit + 1),
                .from = peer,
                .recv = piece(data_, partner(bit), bit + 1)});
  }

  Place place_;
  int index_, cuts_;
  Slice data_;
  Lane lane_;
};

}  // namespace

Schedule halving_doubling_all_reduce(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l)
    schedule.lanes.push_back(HalvingDoubling(shape, in(Space::output, lane_data(shape, l))).run());
  return schedule;
}

/// A smaller block's rank sends its piece to many owners one after the other, while they wait:
/// one eighth of the ranks crossing costs an eighth of the data each way, a single rank all of it.
Cost halving_doubling_all_reduce_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count);
  const int largest = 1 << floor_log2(shape.size), rest = shape.size - largest;
  const int next = rest > 0 ? 1 << floor_log2(rest) : 0;
  const double crossing = rest > 0 ? n / next : 0;
  return {.rounds = 2.0 * floor_log2(shape.size),
          .bytes = 2 * (n * (1 - 1.0 / largest) + crossing),
          .folds = n * (1 - 1.0 / largest) + (rest > 0 ? n / largest : 0)};
}

}  // namespace farandole
