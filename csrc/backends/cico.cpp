// cico (copy-in copy-out): any collective over memory of any kind. Data go in blocks, several in
// flight, through three stages. (Blocks says how data are cut, and what each rank takes.)
//
//   publish  copy what others will read into my slots (not if they map my input), and
//            what is moved from me to me
//   take     read the others' inputs: fold them, or copy them to their places
//   gather   copy the parts that others folded from their slots (all_reduce, reduce)
//
// Each rank announces how many blocks it has brought through each stage. A slot is used again some
// blocks later, by another rank, once all readers of its block are known to be past it, this rank
// among them. All ranks have started this operation, so they have read the slots of the last one.
#include <algorithm>

#include "backends/blocks.h"
#include "backends/paths.h"
#include "base/copy.h"
#include "base/fault.h"
#include "fold/fold.h"

namespace farandole {
namespace {

/// Large results are written past the caches, and so are a scatter's slots: 16 MiB, Zen 4, 1.40 ms,
/// so 1.16. But nothing is if one rank alone shows all of its input in slots: a broadcast 1.46 ms
/// past the caches and 0.97 through them, a send 2.8 and 2.2.
bool is_from_one_whole(Collective kind) {
  return kind == Collective::broadcast || is_between_two(kind);
}

class Cico : public DirectPath {
 public:
  explicit Cico(const StreamMemory& memory)
      : memory_(memory), inputs_(static_cast<size_t>(memory.size())) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    element_ = size_of(operation.input.dtype);
    const bool overwrites = folds(operation.kind) && operation.input.data == operation.output.data;
    streams_ = !overwrites && operation.output.bytes() >= kStreamedBytes;
    shows_past_caches_ =
        operation.kind == Collective::scatter && operation.input.bytes() >= kStreamedBytes;
    blocks_.start(what_, kCicoChunk / element_);
    depth_ = !goes_both_ways(operation.kind, what_.shape()) ? kCicoSlots
             : blocks_.count() < kLongCico                  ? kCicoSlotsBothWays
                                                            : kLongCicoSlots;
    published_ = taken_ = gathered_ = 0;
  }

  Progress poll(TimePoint until) override {
    bool moved = false;
    for (bool again = true; again;) {
      again = step(published_, &Cico::may_publish, &Cico::publish_block);
      again |= step(taken_, &Cico::may_take, &Cico::take_block);
      again |= step(gathered_, &Cico::may_gather, &Cico::gather_block);
      moved |= again;
      if (finished()) {
        first_slot_ += blocks_.count();
        return Progress::finished;
      }
      if (again && has_come(until)) break;
    }
    return moved ? Progress::moved : Progress::idle;
  }

  /// The ranks that a stage waits for; none for a stage that waits for another one here.
  std::vector<int> lacking() const override {
    const uint64_t all = blocks_.count();
    return all_but(memory_, [&](int r) {
      if (published_ < all ? !lets_publish(r, published_) : !lets_finish(r)) return false;
      if (taken_ < all && !lets_take(r, taken_)) return false;
      return gathered_ == all || lets_gather(r, gathered_);
    });
  }

 private:
  bool step(uint64_t& block, bool (Cico::*may)(uint64_t) const, void (Cico::*run)(uint64_t)) {
    if (block >= blocks_.count() || !(this->*may)(block)) return false;
    (this->*run)(block);
    ++block;
    return true;
  }

  bool has(int r, Word StreamPage::* word, uint64_t count) const {
    return r == memory_.rank || reached(memory_.page(r).*word, progress(memory_.sequence(), count));
  }

  bool all_ranks(bool (Cico::*let)(int, uint64_t) const, uint64_t b) const {
    for (int r = 0; r < memory_.size(); ++r)
      if (!(this->*let)(r, b)) return false;
    return true;
  }

  /// If rank r reads my input, through slots or where it lies, it is past `count` blocks.
  bool took(int r, uint64_t count) const { return !reads(r) || has(r, &StreamPage::folded, count); }

  bool finished() const {
    const uint64_t all = blocks_.count();
    if (published_ < all || taken_ < all || gathered_ < all) return false;
    for (int r = 0; r < memory_.size(); ++r)
      if (!lets_finish(r)) return false;
    return true;
  }
  bool lets_finish(int r) const {
    return blocks_.count() == 0 || !shows_in_place() || took(r, blocks_.count());
  }

  // ---- publish ----

  bool shows(int r) const { return blocks_.two_phases() || what_.is_read(r); }
  bool shows_in_place() const { return shows(memory_.rank) && what_.mine_is_shared(); }
  bool shows_by_copy() const { return shows(memory_.rank) && !what_.mine_is_shared(); }

  bool may_publish(uint64_t b) const {
    return !shows_by_copy() || b < depth_ ||
           (taken_ + depth_ > b && all_ranks(&Cico::lets_publish, b));
  }
  bool lets_publish(int r, uint64_t b) const {
    return !shows_by_copy() || b < depth_ || took(r, b - depth_ + 1);
  }

  void publish_block(uint64_t b) {
    if (shows_by_copy()) {
      for (int r = 0; r < memory_.size(); ++r) {
        if (r == memory_.rank || !reads(r)) continue;
        copy(slot(memory_.rank, r, b), what_.operation().input.data, blocks_.shown_to(r, b));
        if (blocks_.in_common()) break;
      }
    }
    fault_point("cico.publish");
    publish(memory_.mine().published, progress(memory_.sequence(), b + 1));
    // Here, while the others take theirs.
    if (!folds(what_.operation().kind)) take_from(memory_.rank, b);
  }

  // ---- take ----

  bool reads(int r) const {
    return blocks_.two_phases() || is_reader(what_.operation().kind, what_.shape(), r);
  }

  bool may_take(uint64_t b) const {
    const bool slot_is_free = b < depth_ || !blocks_.two_phases() || gathered_ + depth_ > b;
    return slot_is_free && all_ranks(&Cico::lets_take, b);
  }
  bool lets_take(int r, uint64_t b) const {
    if (reads(memory_.rank) && shows(r) && what_.input_of(r) == nullptr &&
        !has(r, &StreamPage::published, b + 1))
      return false;
    return b < depth_ || !blocks_.two_phases() || !gathers(r) ||
           has(r, &StreamPage::gathered, b - depth_ + 1);
  }

  void take_block(uint64_t b) {
    if (folds(what_.operation().kind))
      fold_mine(b);
    else
      for (int r = 0; r < memory_.size(); ++r)
        if (r != memory_.rank) take_from(r, b);
    fault_point("cico.fold");
    publish(memory_.mine().folded, progress(memory_.sequence(), b + 1));
  }

  void take_from(int r, uint64_t b) {
    const Route from = blocks_.taken_from(r, b);
    if (from.take.count == 0) return;
    const std::byte* data = shown_by(r, b, from.take);
    std::byte* to = output(from.put);
    const bool by_slots =
        what_.readable_input_of(r) == nullptr && is_from_one_whole(what_.operation().kind);
    if (to != data) deliver(to, data, from.take.count, streams_ && !by_slots);
  }

  void fold_mine(uint64_t b) {
    const Operation& o = what_.operation();
    const Route mine = blocks_.taken_from(memory_.rank, b);
    if (mine.take.count == 0) return;
    for (int r = 0; r < memory_.size(); ++r)
      inputs_[static_cast<size_t>(r)] = shown_by(r, b, mine.take);
    std::byte* outputs[2];
    size_t n = 0;
    if (gathers(memory_.rank) || !blocks_.two_phases()) outputs[n++] = output(mine.put);
    if (has_gatherers()) outputs[n++] = folded_in(memory_.rank, b);
    fold_canonical_to({outputs, n}, inputs_, mine.take.count, o.input.dtype, o.op, scales_);
  }

  /// Where rank r shows what I take of block b: in its input, or in its slots.
  const std::byte* shown_by(int r, uint64_t b, const Slice& take) const {
    const std::byte* whole = what_.readable_input_of(r);
    if (whole != nullptr) return whole + take.offset * element_;
    return slot(r, memory_.rank, b);
  }

  // ---- gather ----

  bool gathers(int r) const {
    const Operation& o = what_.operation();
    return o.kind == Collective::all_reduce || (o.kind == Collective::reduce && o.root == r);
  }
  /// Whether others take the results that I fold.
  bool has_gatherers() const {
    return blocks_.two_phases() &&
           (what_.operation().kind == Collective::all_reduce || !gathers(memory_.rank));
  }

  bool may_gather(uint64_t b) const { return all_ranks(&Cico::lets_gather, b); }
  bool lets_gather(int r, uint64_t b) const {
    return !gathers(memory_.rank) || has(r, &StreamPage::folded, b + 1);
  }

  void gather_block(uint64_t b) {
    if (!gathers(memory_.rank)) return;
    for (int r = 0; r < memory_.size(); ++r) {
      if (r == memory_.rank) continue;
      const Slice theirs = blocks_.folded_by(r, b);
      deliver(output(theirs), folded_in(r, b), theirs.count, streams_);
    }
    fault_point("cico.gather");
    publish(memory_.mine().gathered, progress(memory_.sequence(), b + 1));
  }

  // ---- where things are ----

  uint64_t turn(uint64_t b) const { return (first_slot_ + b) % depth_; }
  uint64_t lap(uint64_t b) const { return (first_slot_ + b) / depth_; }

  /// Where rank `from` shows `to` its part of block b.
  std::byte* slot(int from, int to, uint64_t b) const {
    if (blocks_.in_common()) return input_slot(memory_.home(from, lap(b)), memory_.size(), turn(b));
    if (lap(b) % 2 == 1) std::swap(from, to);  // lent to each other
    return input_slot(memory_.page(from), memory_.size(), turn(b)) +
           static_cast<size_t>(to) * kCicoChunk;
  }
  /// Where rank r shows the results that it folded.
  std::byte* folded_in(int r, uint64_t b) const {
    return result_slot(memory_.home(r, lap(b)), memory_.size(), turn(b));
  }

  void deliver(std::byte* to, const std::byte* from, size_t count, bool past_caches) const {
    (past_caches ? stream_copy : copy_bytes)(to, from, count * element_);
  }

  std::byte* output(const Slice& s) const {
    return what_.operation().output.data + s.offset * element_;
  }

  void copy(std::byte* to, const std::byte* from, const Slice& s) const {
    deliver(to, from + s.offset * element_, s.count, shows_past_caches_);
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  Blocks blocks_;
  bool streams_ = false;            // results go past the caches
  bool shows_past_caches_ = false;  // so does what others will read
  Scales scales_;
  std::vector<const std::byte*> inputs_;
  size_t element_ = 1;
  uint64_t depth_ = 1;  // blocks in flight: the same on all ranks
  uint64_t published_ = 0, taken_ = 0, gathered_ = 0;
  uint64_t first_slot_ = 0;  // blocks of all operations before: the same on all ranks
};

}  // namespace

constinit extern const PathRow kCico{
    .name = "cico",
    .make = make_path<Cico>,
    .alone = Alone::nothing,
    .copies = true,
    .usual = {.start = 4e-6, .byte = 1 / 25e9},
    // Published once; of a fold everybody reads a part of each input, and results are gathered.
    .traffic = [](Collective kind, double size) {
      const bool gathers = kind == Collective::all_reduce || kind == Collective::reduce;
      return gathers ? 3 : 1 + inputs_read(kind, size);
    }};

}  // namespace farandole
