// CMA, cross-memory attach: collectives over buffers of any kind, one copy, which the kernel makes
// from or to another rank's memory by its address. Buffers that all ranks map are used where they
// lie. Two waits, none per piece.
//
//   all_reduce   rank r fetches part r of every other rank's input, folds it into its own output,
//                and writes it to the others' (with mapped buffers alone it is `mapped`)
//   the others   every rank fetches what it needs of the others' inputs, from where they lie to
//                where it belongs, or folds it there
//
// An all-reduce writes into memory of other ranks, so every piece that does is a Visit.
#include <algorithm>

#include "backends/fetch.h"
#include "backends/paths.h"
#include "base/copy.h"
#include "base/fault.h"
#include "fold/fold.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

constexpr size_t kBytesPerLook = 256 << 10;  // bytes copied between two looks at the clock

class Cma : public DirectPath {
 public:
  explicit Cma(const StreamMemory& memory) : memory_(memory), fetch_(memory) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    mine_ = spreads() ? part({Space::input, 0, operation.input.count}, memory_.size(), memory_.rank)
                      : what_.route_to_me(memory_.rank).take;
    from_ = 0;
    done_ = 0;
    announced_ = false;
  }

  Progress poll(TimePoint until) override {
    while (!has_everything()) {
      if (!run_piece()) return Progress::idle;  // a rank ended, or the group failed
      if (!has_everything() && has_come(until)) return Progress::moved;
    }
    const uint64_t target = progress(memory_.sequence(), 1);
    const Progress waiting = announced_ ? Progress::idle : Progress::moved;
    if (!announced_) publish(memory_.mine().folded, target);
    announced_ = true;
    // Peers that read my input, or write my output, must be done with it.
    for (int r = 0; (spreads() || what_.is_read(memory_.rank)) && r < memory_.size(); ++r)
      if (!reached(memory_.page(r).folded, target)) return waiting;
    return Progress::finished;
  }

  std::vector<int> lacking() const override { return not_folded(memory_, 1); }

 private:
  Collective kind() const { return what_.operation().kind; }
  bool spreads() const { return kind() == Collective::all_reduce; }
  size_t element() const { return size_of(what_.operation().input.dtype); }

  bool has_everything() const {
    return folds(kind()) ? done_ == mine_.count : from_ == memory_.size();
  }
  bool run_piece() { return folds(kind()) ? fold_piece() : copy_piece(); }

  // ---- kinds that fold: done_ counts elements of my part, which is the same of every input ----

  bool fold_piece() {
    const Operation& o = what_.operation();
    const size_t count = std::min(mine_.count - done_, fetch_.piece_bytes() / element());
    const size_t at = (mine_.offset + done_) * element();
    if (!fetch_.fetch(what_, at, count * element())) return false;
    if (spreads()) {
      if (!spread_piece(at, count)) return false;
    } else {
      fault_point("cma.fetch");
      fold_canonical(o.output.data + done_ * element(), fetch_.inputs(), count, o.input.dtype, o.op,
                     scales_);
    }
    done_ += count;
    return true;
  }

  /// Folds to my output and those that are mapped here, and copies it to the others.
  bool spread_piece(size_t at, size_t count) {
    const Visit visit(memory_);
    if (!visit.welcome()) return false;
    fault_point("cma.write");
    const Operation& o = what_.operation();
    outputs_.assign(1, o.output.data + at);
    for (int r = 0; r < memory_.size(); ++r)
      if (r != memory_.rank && what_.output_of(r) != nullptr)
        outputs_.push_back(what_.output_of(r) + at);
    fold_canonical_to(outputs_, fetch_.inputs(), count, o.input.dtype, o.op, scales_);
    for (int r = 0; r < memory_.size(); ++r)
      if (r != memory_.rank && what_.output_of(r) == nullptr &&
          !what_.write(r, what_.foreign_output_of(r) + at, outputs_[0], count * element()))
        return false;
    return true;
  }

  // ---- the others copy: done_ counts bytes of one route, the next rank's first ----

  bool copy_piece() {
    const int r = (memory_.rank + 1 + from_) % memory_.size();
    const Route route = what_.route_to_me(r);
    const size_t whole = route.take.count * element();
    const size_t bytes = std::min(kBytesPerLook, whole - done_);
    fault_point("cma.fetch");
    if (bytes > 0 && !copy(r, route.take.offset * element() + done_,
                           route.put.offset * element() + done_, bytes))
      return false;
    done_ += bytes;
    if (done_ < whole) return true;
    ++from_;
    done_ = 0;
    return true;
  }

  bool copy(int r, size_t taken_at, size_t put_at, size_t bytes) {
    const Operation& o = what_.operation();
    std::byte* to = o.output.data + put_at;
    const std::byte* whole = r == memory_.rank ? o.input.data : what_.input_of(r);
    if (whole == nullptr) return what_.read(r, to, what_.foreign_input_of(r) + taken_at, bytes);
    if (to != whole + taken_at) copy_bytes(to, whole + taken_at, bytes);
    return true;
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  Fetch fetch_;
  Scales scales_;
  Slice mine_;
  int from_ = 0;  // so many ranks' inputs have been copied
  size_t done_ = 0;
  bool announced_ = false;
  std::vector<std::byte*> outputs_;
};

}  // namespace

constinit extern const PathRow kCma{
    .name = "cma",
    .make = make_path<Cma>,
    .alone = Alone::nothing,
    .by_address = true,
    .usual = {.start = 3e-6, .byte = 1 / 25e9},
    .traffic = [](Collective kind, double size) {
      return kind == Collective::all_reduce ? 2 : inputs_read(kind, size);
    }};

}  // namespace farandole
