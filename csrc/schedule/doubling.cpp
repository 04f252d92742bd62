// Recursive doubling on whole buffers, for small messages: few rounds, and everybody folds.
//
//   block of G ranks, split into left [0, p) and right [p, G), q = G - p ≤ p
//     1. left and right by themselves: the first q ranks of each have their block's total
//     2. left j and right j exchange totals, j < q: these 2q ranks have the total of all
//     3. the other p - q ranks are sent it, by as many again in every round
//
// For powers of two there is nothing to do in 3 and this is the classic; for 2^k + 1 it is a
// binomial tree up and down.
#include <algorithm>

#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// One message, or exchange, on the whole of a lane's data; where it lies is decided afterwards.
struct Event {
  int to = kNobody, from = kNobody;
  Action action = Action::store;
  bool leaf_arrived = false;
  bool finish = false;
};

class Doubling {
 public:
  explicit Doubling(const Shape& shape) : size_(shape.size), rank_(shape.rank) {
    block(0, shape.size, shape.size);
  }
  const std::vector<Event>& events() const { return events_; }

 private:
  /// Leaves the first `needed` ranks of the block with its total; the others need not have it,
  /// because all they will be sent is the total of a larger block.
  void block(int begin, int size, int needed) {
    if (size == 1) return;
    const int left = split_of(size), right = size - left;
    if (rank_ < begin + left)
      block(begin, left, std::min(right, needed));
    else
      block(begin + left, right, std::min(right, needed));
    exchange(begin, left, right, needed);
    if (needed == size) spread(begin, left, right);
  }

  void exchange(int begin, int left, int right, int needed) {
    const int me = rank_ - begin;
    const bool is_left = me < left;
    if (is_left && me >= right) return;
    const int other = is_left ? me + left : me - left;
    Event event;
    if (other < needed) event.to = begin + other;
    if (me < needed) {
      event.from = begin + other;
      event.action = is_left ? Action::fold_upper : Action::fold_lower;
      event.leaf_arrived = (is_left ? right : left) == 1;
      event.finish = left + right == size_;
    }
    if (other < needed || me < needed) events_.push_back(event);
  }

  /// In line: left [0, q), right [0, q), then left [q, p), which have nothing yet.
  void spread(int begin, int left, int right) {
    const int me = rank_ - begin, size = left + right;
    const int mine = me >= left ? me - left + right : me < right ? me : me + right;
    const auto rank_at = [&](int i) {
      return begin + (i < right ? i : i < 2 * right ? left + i - right : i - right);
    };
    for (int known = 2 * right; known < size; known *= 2) {
      if (mine < known && mine + known < size)
        events_.push_back({.to = rank_at(mine + known)});
      else if (mine >= known && mine < 2 * known)
        events_.push_back({.from = rank_at(mine - known)});
    }
  }

  int size_, rank_;
  std::vector<Event> events_;
};

/// Everything received gets a place other than what is being sent: two slots in turn, and output
/// for the last, unless that is all there is: then input is being sent, and in place that is
/// output.
Lane place(const std::vector<Event>& events, const Shape& shape, Slice data, size_t scratch) {
  const auto comes = [](const Event& event) { return event.from != kNobody; };
  const auto results = std::count_if(events.begin(), events.end(), comes);
  const Event& first = *std::find_if(events.begin(), events.end(), comes);
  const bool copy = results == 1 && first.to != kNobody;
  Lane lane;
  Slice current = in(Space::input, data);
  std::ptrdiff_t nth = 0;
  for (const Event& event : events) {
    Step step{.to = event.to, .send = event.to == kNobody ? Slice{} : current};
    if (comes(event)) {
      ++nth;
      const size_t slot = nth % 2 == 0 ? data.count : 0;
      step.from = event.from;
      step.recv =
          nth == results && !copy ? data : Slice{Space::scratch, scratch + slot, data.count};
      step.action = event.action;
      step.leaf_arrived = event.leaf_arrived;
      step.finish = event.finish;
      if (event.action != Action::store) {
        step.held = current;
        step.leaf_held = current.space == Space::input;
      }
      current = step.recv;
    }
    add(lane, step);
  }
  if (copy) add(lane, {.to = shape.rank, .send = current, .from = shape.rank, .recv = data});
  return lane;
}

/// Rounds of a block if every message waits for the slower of its ends: never fewer than there are.
int rounds_of(int size) {
  if (size == 1) return 0;
  const int left = split_of(size), right = size - left;
  int rounds = std::max(rounds_of(left), rounds_of(right)) + 1;
  for (int known = 2 * right; known < size; known *= 2) ++rounds;
  return rounds;
}

}  // namespace

Schedule doubling_all_reduce(const Shape& shape) {
  const Doubling plan(shape);
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const Slice data = in(Space::output, lane_data(shape, l));
    schedule.lanes.push_back(place(plan.events(), shape, data, schedule.scratch));
    schedule.scratch += 2 * data.count;
  }
  return schedule;
}

Cost doubling_all_reduce_cost(const Shape& shape) {
  const double n = static_cast<double>(shape.count), rounds = rounds_of(shape.size);
  return {.rounds = rounds, .bytes = n * rounds, .folds = n * ceil_log2(shape.size)};
}

}  // namespace farandole
