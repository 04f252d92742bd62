#include "schedule/check.h"

#include <deque>

#include "schedule/expectation.h"
#include "schedule/slicing.h"
#include "schedule/symbols.h"

namespace farandole {
namespace {

/// Where a lane stands, and of whom it has heard.
struct Cursor {
  size_t step = 0;
  bool sent = false, received = false;
  std::vector<uint64_t> heard, told;  // sets of ranks; told: what a message of this step can know
};

class Execution {
 public:
  Execution(Collective collective, const Shape& world, std::span<const Schedule> schedules,
            Buffers buffers)
      : collective_(collective),
        world_(world),
        schedules_(schedules),
        expectation_(collective, world),
        expressions_(leaf_count(world)) {
    if (std::ssize(schedules) != world.size)
      throw Fault{"there are " + std::to_string(schedules.size()) + " schedules for " +
                  std::to_string(world.size) + " ranks"};
    lanes_ = schedules.front().lanes.size();
    for (int r = 0; r < world.size; ++r) set_up(r, buffers);
  }

  Order run() {
    for (int r = 0; r < world_.size; ++r)
      for (size_t l = 0; l < lanes_; ++l) inspect(r, l);
    advance_all();
    return collective_ == Collective::barrier ? judge_barrier() : judge_outputs();
  }

 private:
  // --- the world before the first step

  void set_up(int rank, Buffers buffers) {
    const Schedule& schedule = schedules_[static_cast<size_t>(rank)];
    if (schedule.lanes.size() != lanes_)
      throw Fault{"rank " + std::to_string(rank) + " has " + std::to_string(schedule.lanes.size()) +
                  " lanes, rank 0 has " + std::to_string(lanes_)};
    Memory& memory = memories_.emplace_back(expectation_.extents(rank), schedule.scratch, buffers);
    Value* cell = memory.at({Space::input, 0, 0});
    for (const Origin& given : expectation_.input(rank))
      *cell++ = {given.leaf, given.element, Stage::raw};
    // A barrier's tokens have no meaning, so unset ones may travel.
    if (collective_ == Collective::barrier)
      std::fill_n(memory.at({Space::scratch, 0, 0}), schedule.scratch, Value{0, 0, Stage::raw});
    std::vector<uint64_t> self((static_cast<size_t>(world_.size) + 63) / 64);
    self[static_cast<size_t>(rank) / 64] = uint64_t{1} << (rank % 64);
    for (size_t l = 0; l < lanes_; ++l) cursors_.push_back({.heard = self, .told = self});
  }

  // --- what one step must obey by itself

  void inspect(int rank, size_t lane) {
    const Memory& memory = memories_[static_cast<size_t>(rank)];
    const auto exists = [&](int peer) { return peer >= kNobody && peer < world_.size; };
    const Lane& steps = lane_of(rank, lane);
    for (size_t i = 0; i < steps.size(); ++i) {
      const Step& s = steps[i];
      const bool sends = is_sending(s), receives = is_receiving(s);
      const bool local = s.to == rank || s.from == rank;
      const auto require = [&](bool holds, const char* otherwise) {
        if (!holds) throw Fault{place(rank, lane, i) + otherwise};
      };
      require(exists(s.to) && exists(s.from), "names a rank that does not exist");
      require(!local || s.to == s.from, "talks to itself and to another");
      require(!local || s.send.count == s.recv.count, "stores more or less than it takes");
      require(!sends || memory.contains(s.send), "sends from outside the buffer");
      if (!receives) continue;
      require(memory.contains(s.recv), "receives outside the buffer");
      require(s.recv.space != Space::input, "writes to input");
      require(!sends || !memory.overlap(s.send, s.recv) || (local && memory.same(s.send, s.recv)),
              "sends and receives in overlapping slices");
      if (s.action == Action::store) {
        require(s.held.count == 0 && !s.leaf_held, "holds an operand but does not fold");
        continue;
      }
      require(folds(collective_), "folds in a collective that only moves data");
      const Slice held = held_of(s);
      require(held.count == s.recv.count, "folds slices of different lengths");
      require(memory.contains(held), "holds an operand outside the buffer");
      require(memory.same(held, s.recv) || !memory.overlap(held, s.recv),
              "overwrites part of the operand it holds");
    }
  }

  // --- running

  void advance_all() {
    for (int r = 0; r < world_.size; ++r)
      for (size_t l = 0; l < lanes_; ++l) ready_.push_back({r, l});
    while (!ready_.empty()) {
      const auto [rank, lane] = ready_.front();
      ready_.pop_front();
      advance(rank, lane);
    }
    report_stuck();
  }

  void advance(int rank, size_t lane) {
    while (const Step* s = current(rank, lane)) {
      Cursor& me = cursor(rank, lane);
      if (!is_sending(*s)) me.sent = true;
      if (!is_receiving(*s)) me.received = true;
      if (!me.sent) try_transfer(rank, s->to, lane);
      if (!me.received) try_transfer(s->from, rank, lane);
      if (!me.sent || !me.received) return;
      ++me.step;
      me.sent = me.received = false;
      me.told = me.heard;
    }
  }

  void try_transfer(int from, int to, size_t lane) {
    const Step *out = current(from, lane), *into = current(to, lane);
    Cursor &sender = cursor(from, lane), &receiver = cursor(to, lane);
    if (out == nullptr || into == nullptr || sender.sent || receiver.received) return;
    if (!is_sending(*out) || out->to != to || !is_receiving(*into) || into->from != from) return;
    try {
      if (out->send.count != into->recv.count)
        throw Fault{"expects " + std::to_string(into->recv.count) + " elements of rank " +
                    std::to_string(from) + ", who sends " + std::to_string(out->send.count)};
      transfer(memories_[static_cast<size_t>(from)], *out, memories_[static_cast<size_t>(to)],
               *into, static_cast<uint16_t>(lane));
    } catch (const Fault& fault) {
      throw Fault{place(to, lane, receiver.step) + fault.what};
    }
    for (size_t w = 0; w < receiver.heard.size(); ++w) receiver.heard[w] |= sender.told[w];
    sender.sent = receiver.received = true;
    if (from != to) ready_.push_back({from, lane}), ready_.push_back({to, lane});
  }

  void transfer(Memory& source, const Step& out, Memory& target, const Step& into, uint16_t lane) {
    const bool folds = into.action != Action::store;
    source.note_read(out.send, lane);
    if (folds) target.note_read(held_of(into), lane);
    target.note_write(into.recv, lane);
    const Value *arrived = source.at(out.send), *held = target.at(held_of(into));
    Value* result = target.at(into.recv);
    for (size_t i = 0; i < out.send.count; ++i) {
      Value value = operand(arrived[i], into.leaf_arrived);
      if (folds) value = folded(value, operand(held[i], into.leaf_held), into.action);
      if (into.finish) value = finished(value);
      result[i] = value;
    }
  }

  /// `value` as the receiver takes it: scaled, if the collective scales at all.
  Value operand(Value value, bool is_leaf) const {
    if (value.stage == Stage::unset) throw Fault{"reads what was never set"};
    if (!folds(collective_)) {
      if (is_leaf) throw Fault{"scales data that is only moved"};
      return value;
    }
    if (is_leaf && value.stage != Stage::raw) throw Fault{"scales a leaf a second time"};
    if (!is_leaf && value.stage == Stage::raw) throw Fault{"takes a leaf without scaling it"};
    if (is_leaf) value.stage = Stage::partial;
    return value;
  }

  Value folded(Value arrived, Value held, Action action) {
    if (arrived.stage == Stage::finished || held.stage == Stage::finished)
      throw Fault{"folds what is finished"};
    if (arrived.element != held.element)
      throw Fault{"folds element " + std::to_string(arrived.element) + " with element " +
                  std::to_string(held.element)};
    const Value &lower = action == Action::fold_upper ? held : arrived,
                &upper = action == Action::fold_upper ? arrived : held;
    return {expressions_.fold(lower.expression, upper.expression), held.element, Stage::partial};
  }

  Value finished(Value value) const {
    if (!folds(collective_)) throw Fault{"finishes data that is only moved"};
    if (value.stage == Stage::finished) throw Fault{"finishes a slice a second time"};
    value.stage = Stage::finished;
    return value;
  }

  void report_stuck() const {
    std::string first;
    size_t stuck = 0;
    for (int r = 0; r < world_.size; ++r)
      for (size_t l = 0; l < lanes_; ++l) {
        const Step* s = current(r, l);
        if (s == nullptr || ++stuck > 1) continue;
        const Cursor& c = cursor(r, l);
        first = place(r, l, c.step) + "waits for ever";
        if (!c.sent) first += " to send to rank " + std::to_string(s->to);
        if (!c.sent && !c.received) first += " and";
        if (!c.received) first += " to receive from rank " + std::to_string(s->from);
      }
    if (stuck > 0)
      throw Fault{"deadlock: " + first + " (" + std::to_string(stuck) + " lanes are stuck)"};
  }

  // --- the world after the last step

  Order judge_outputs() {
    Order order = Order::canonical;
    for (int r = 0; r < world_.size; ++r) {
      const Value* out = memories_[static_cast<size_t>(r)].at({Space::output, 0, 0});
      const std::vector<Origin> wanted = expectation_.output(r);
      for (size_t i = 0; i < wanted.size(); ++i) {
        try {
          order = std::min(order, judge(out[i], wanted[i]));
        } catch (const Fault& fault) {
          throw Fault{"rank " + std::to_string(r) + ", output " + std::to_string(i) + ": " +
                      fault.what};
        }
      }
    }
    return order;
  }

  Order judge(const Value& value, const Origin& wanted) {
    const auto require = [](bool holds, const char* otherwise) {
      if (!holds) throw Fault{otherwise};
    };
    require(value.stage != Stage::unset, "was never set");
    require(value.element == wanted.element, "is another element");
    if (!folds(collective_)) {
      require(value.expression == wanted.leaf, "is another rank's");
      return Order::canonical;
    }
    require(expressions_.is_complete(value.expression), "lacks contributions");
    require(value.stage == Stage::finished, "was never finished");
    if (seen_.size() <= value.element) seen_.resize(value.element + size_t{1}, kNone);
    uint32_t& first = seen_[value.element];
    if (first == kNone) first = value.expression;
    require(first == value.expression, "differs from that of a lower rank");
    return value.expression == expressions_.canonical() ? Order::canonical
                                                        : Order::same_on_all_ranks;
  }

  Order judge_barrier() const {
    for (int r = 0; r < world_.size; ++r)
      for (int other = 0; other < world_.size; ++other) {
        bool heard = r == other;
        for (size_t l = 0; l < lanes_; ++l)
          heard |= (cursor(r, l).heard[static_cast<size_t>(other) / 64] >> (other % 64) & 1) != 0;
        if (!heard)
          throw Fault{"rank " + std::to_string(r) + " leaves without having heard of rank " +
                      std::to_string(other)};
      }
    return Order::canonical;
  }

  // --- small words

  static constexpr uint32_t kNone = ~uint32_t{0};
  static bool is_sending(const Step& s) { return s.to != kNobody && s.send.count > 0; }
  static bool is_receiving(const Step& s) { return s.from != kNobody && s.recv.count > 0; }
  static Slice held_of(const Step& s) { return s.held.count == 0 ? s.recv : s.held; }

  const Lane& lane_of(int rank, size_t lane) const {
    return schedules_[static_cast<size_t>(rank)].lanes[lane];
  }
  const Cursor& cursor(int rank, size_t lane) const {
    return cursors_[static_cast<size_t>(rank) * lanes_ + lane];
  }
  Cursor& cursor(int rank, size_t lane) {
    return cursors_[static_cast<size_t>(rank) * lanes_ + lane];
  }
  const Step* current(int rank, size_t lane) const {
    const Lane& steps = lane_of(rank, lane);
    const size_t at = cursor(rank, lane).step;
    return at < steps.size() ? &steps[at] : nullptr;
  }
  static std::string place(int rank, size_t lane, size_t step) {
    return "rank " + std::to_string(rank) + ", lane " + std::to_string(lane) + ", step " +
           std::to_string(step) + ": ";
  }

  Collective collective_;
  const Shape& world_;
  std::span<const Schedule> schedules_;
  Expectation expectation_;
  Expressions expressions_;
  size_t lanes_ = 0;
  std::vector<uint32_t> seen_;  // what the first rank has of each element
  std::vector<Memory> memories_;
  std::vector<Cursor> cursors_;
  std::deque<std::pair<int, size_t>> ready_;
};

}  // namespace

Proof check(Collective collective, const Shape& world, std::span<const Schedule> by_rank,
            Buffers buffers) {
  try {
    return {"", Execution(collective, world, by_rank, buffers).run()};
  } catch (const Fault& fault) {
    return {fault.what, Order::none};
  }
}

Proof check(Collective collective, const Shape& world, std::span<const Schedule> by_rank) {
  Proof apart = check(collective, world, by_rank, Buffers::apart);
  if (!apart.problem.empty() || !goes_in_place(collective)) return apart;
  Proof in_place = check(collective, world, by_rank, Buffers::in_place);
  if (!in_place.problem.empty()) in_place.problem = "in place: " + in_place.problem;
  return in_place.order < apart.order ? in_place : apart;
}

}  // namespace farandole
