// pull: collectives that only read other ranks' memory. Every rank fetches what it needs of the
// others' inputs, from where they lie to where it belongs: one copy. When all have, it is done.
#include <algorithm>

#include "backends/fetch.h"
#include "base/copy.h"
#include "base/fault.h"
#include "fold/fold.h"

namespace farandole {
namespace {

constexpr size_t kPiece = 256 << 10;  // bytes between two looks at the clock

class Pull : public DirectPath {
 public:
  explicit Pull(const StreamMemory& memory) : memory_(memory), fetch_(memory) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    from_ = 0;
    done_ = 0;
    announced_ = false;
  }

  Progress poll(TimePoint until) override {
    while (!has_everything()) {
      if (!(folds(kind()) ? fold_piece() : copy_piece()))
        return Progress::idle;  // a rank ended, or the group failed
      if (!has_everything() && now() >= until) return Progress::moved;
    }
    const uint64_t target = progress(memory_.sequence(), 1);
    const Progress waiting = announced_ ? Progress::idle : Progress::moved;
    if (!announced_) publish(memory_.mine().folded, target);
    announced_ = true;
    // Peers that read my input must be done with it.
    for (int r = 0; is_read() && r < memory_.size(); ++r)
      if (!reached(memory_.page(r).folded, target)) return waiting;
    return Progress::finished;
  }

  std::vector<int> lacking() const override { return not_folded(memory_, 1); }

 private:
  Collective kind() const { return what_.operation().kind; }
  bool is_read() const { return what_.is_read(memory_.rank); }

  // ---- what folds: from_ stays 0 until my part is folded ----

  bool has_everything() const {
    return folds(kind()) ? done_ == my_part().count : from_ == memory_.size();
  }
  /// The same of every rank's input.
  Slice my_part() const { return what_.route_to_me(memory_.rank).take; }

  bool fold_piece() {
    const Operation& o = what_.operation();
    const size_t element = size_of(o.input.dtype);
    const Slice mine = my_part();
    const size_t count = std::min(mine.count - done_, fetch_.piece_bytes() / element);
    if (!fetch_.fetch(what_, (mine.offset + done_) * element, count * element)) return false;
    fault_point("pull.fetch");
    fold_canonical(o.output.data + done_ * element, fetch_.inputs(), count, o.input.dtype, o.op,
                   scales_);
    done_ += count;
    return true;
  }

  // ---- the others copy: done_ counts bytes of one route, the next rank's first ----

  bool copy_piece() {
    const int r = (memory_.rank + 1 + from_) % memory_.size();
    const Route route = what_.route_to_me(r);
    const size_t element = size_of(what_.operation().input.dtype);
    const size_t whole = route.take.count * element;
    const size_t bytes = std::min(kPiece, whole - done_);
    fault_point("pull.fetch");
    if (bytes > 0 &&
        !copy(r, route.take.offset * element + done_, route.put.offset * element + done_, bytes))
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
  int from_ = 0;  // so many ranks' inputs have been copied
  size_t done_ = 0;
  bool announced_ = false;
};

}  // namespace

std::unique_ptr<DirectPath> make_pull(const StreamMemory& memory) {
  return std::make_unique<Pull>(memory);
}

}  // namespace farandole
