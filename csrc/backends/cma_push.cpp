// push: an all-reduce over buffers of any kind. Rank r fetches part r of every other rank's input,
// folds it into its own output and writes it to the others'; when all have, it is done. Two waits,
// none per piece. Buffers that all ranks map are used where they lie: with those alone it is
// `window`.
//
// It writes into memory of other ranks, so every piece that does is a Visit.
#include <algorithm>

#include "backends/fetch.h"
#include "base/fault.h"
#include "fold/fold.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

class Push : public DirectPath {
 public:
  explicit Push(const StreamMemory& memory) : memory_(memory), fetch_(memory) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    mine_ = part({Space::input, 0, operation.input.count}, memory_.size(), memory_.rank);
    done_ = 0;
    announced_ = false;
  }

  Progress poll(TimePoint until) override {
    while (done_ < mine_.count) {
      if (!run_piece()) return Progress::idle;  // a rank ended, or the group failed
      if (done_ < mine_.count && now() >= until) return Progress::moved;
    }
    const uint64_t target = progress(memory_.sequence(), 1);
    const Progress waiting = announced_ ? Progress::idle : Progress::moved;
    if (!announced_) publish(memory_.mine().folded, target);
    announced_ = true;
    for (int r = 0; r < memory_.size(); ++r)
      if (!reached(memory_.page(r).folded, target)) return waiting;
    return Progress::finished;
  }

  std::vector<int> lacking() const override { return not_folded(memory_, 1); }

 private:
  bool run_piece() {
    const size_t element = size_of(what_.operation().input.dtype);
    const size_t count = std::min(mine_.count - done_, fetch_.piece_bytes() / element);
    const size_t at = (mine_.offset + done_) * element;
    if (!fetch_.fetch(what_, at, count * element)) return false;
    const Visit visit(memory_);
    if (!visit.welcome()) return false;
    fault_point("push.write");
    if (!spread(at, count)) return false;
    done_ += count;
    return true;
  }

  /// Folds to my output and those that are mapped here, and copies it to the others.
  bool spread(size_t at, size_t count) {
    const Operation& o = what_.operation();
    outputs_.assign(1, o.output.data + at);
    for (int r = 0; r < memory_.size(); ++r)
      if (r != memory_.rank && what_.output_of(r) != nullptr)
        outputs_.push_back(what_.output_of(r) + at);
    fold_canonical_to(outputs_, fetch_.inputs(), count, o.input.dtype, o.op, scales_);
    for (int r = 0; r < memory_.size(); ++r)
      if (r != memory_.rank && what_.output_of(r) == nullptr &&
          !what_.write(r, what_.foreign_output_of(r) + at, outputs_[0],
                       count * size_of(o.input.dtype)))
        return false;
    return true;
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  Fetch fetch_;
  Scales scales_;
  Slice mine_;
  size_t done_ = 0;  // elements of my part
  bool announced_ = false;
  std::vector<std::byte*> outputs_;
};

}  // namespace

std::unique_ptr<DirectPath> make_push(const StreamMemory& memory) {
  return std::make_unique<Push>(memory);
}

}  // namespace farandole
