// mapped: an all-reduce, or a reduce, over buffers that every rank maps. Rank r folds part r out of
// all inputs and stores it to all outputs; when all have, it is done. Two waits, least bytes moved.
// Or a gather to an output that every rank maps: each stores its share there, at the same time.
//
// An epilogue works on the folded part tile by tile, between fold and store.
//
// It writes into memory of other ranks, so every piece is a Visit.
#include <algorithm>
#include <cstring>

#include "backends/paths.h"
#include "base/copy.h"
#include "base/fault.h"
#include "fold/fold.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

constexpr size_t kMappedBytesPerLook = 128 << 10;  // bytes between two looks at the clock
/// From so many bytes of the longest input on, ranks hand in what is gathered; of less, the root
/// waits longer for lines that they write than for those that it reads. Two ranks, Zen 4, both
/// shares: 256 KiB read 6.8 us, handed in 15; 1 MiB 38 and 37; 4 MiB 137 and 76; 16 MiB 930 and
/// 690.
constexpr size_t kHandedInBytes = 1 << 20;
constexpr size_t kTile = kEpilogueBytes;  // fits the first cache with the optimizer's state
static_assert(kMappedBytesPerLook % kTile == 0);

/// Every operand is a destination here: a line that is read ahead has to be asked for once more to
/// be written. While all that is written fits the cores' own caches, lines come from the other's
/// and are asked for as to be written; then from memory, which has no time for more requests. Two
/// ranks, Zen 4, float32, interleaved, nothing asked for over reading ahead: 256 KiB 0.88, 1 MiB
/// 0.88, 4 MiB 0.81, 16 MiB 0.73; over ownership: 1.01, 1.02, 1.04, 0.93 (and 0.95 at 64 MiB).
constexpr size_t kOwnedBytes = 4 << 20;

class Mapped : public DirectPath {
 public:
  explicit Mapped(const StreamMemory& memory)
      : memory_(memory), inputs_(static_cast<size_t>(memory.size())) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    const Slice whole{Space::input, 0, operation.input.count};
    mine_ = folds(operation.kind) ? part(whole, memory_.size(), memory_.rank) : whole;
    done_ = 0;
    written_ = false;
    ahead_ = operation.input.bytes() <= kOwnedBytes ? Ahead::ownership : Ahead::nothing;
  }

  Progress poll(TimePoint until) override {
    const uint64_t target = progress(memory_.sequence(), 1);
    bool moved = false;
    while (!written_) {
      if (!write_piece()) return Progress::idle;  // aborted
      moved = true;
      if (!written_ && has_come(until)) return Progress::moved;
    }
    if (moved) publish(memory_.mine().folded, target);
    for (int r = 0; r < memory_.size(); ++r)
      if (!reached(memory_.page(r).folded, target)) return moved ? Progress::moved : Progress::idle;
    return Progress::finished;
  }

  std::vector<int> lacking() const override { return not_folded(memory_, 1); }

 private:
  bool write_piece() {
    const Operation& o = what_.operation();
    const size_t element = size_of(o.input.dtype);
    const size_t count = std::min(mine_.count - done_, kMappedBytesPerLook / element);
    const Visit visit(memory_);
    if (!visit.welcome()) return false;
    fault_point("mapped.write");
    if (folds(o.kind))
      fold(count, (mine_.offset + done_) * element);
    else
      hand_in(count * element, done_ * element);
    done_ += count;
    written_ = done_ == mine_.count;
    return true;
  }

  void fold(size_t count, size_t at) {
    const Operation& o = what_.operation();
    outputs_.clear();
    for (int r = 0; r < memory_.size(); ++r) {
      inputs_[static_cast<size_t>(r)] = what_.input_of(r) + at;
      if (what_.output_bytes(r) > 0) outputs_.push_back(what_.output_of(r) + at);
    }
    if (o.epilogue)
      transform(count);
    else
      fold_canonical_to(outputs_, inputs_, count, o.input.dtype, o.op, scales_, ahead_);
  }

  /// From my share to where the root gathers it.
  void hand_in(size_t bytes, size_t at) {
    const Operation& o = what_.operation();
    const Slice place = route(o.kind, what_.shape(), memory_.rank, o.root).put;
    std::byte* to = what_.output_of(o.root) + place.offset * size_of(o.input.dtype) + at;
    const std::byte* from = o.input.data + at;
    if (to == from) return;  // in place
    const bool streams = what_.output_bytes(o.root) >= kStreamedBytes;
    (streams ? stream_copy : copy_bytes)(to, from, bytes);
  }

  /// `count` elements from inputs_ through the epilogue to outputs_.
  void transform(size_t count) {
    const Operation& o = what_.operation();
    const size_t element = size_of(o.input.dtype);
    const size_t first = mine_.offset + done_;
    std::byte* const result = outputs_[static_cast<size_t>(memory_.rank)];
    tile_.resize(kTile);
    for (size_t at = 0; at < count; at += kTile / element) {
      const size_t here = std::min(count - at, kTile / element);
      fold_canonical(tile_.data(), inputs_, here, o.input.dtype, o.op, scales_);
      o.epilogue->apply(result + at * element, tile_.data(), first + at, here);
      for (std::byte* output : outputs_)
        if (output != result && o.epilogue->stores())
          std::memcpy(output + at * element, result + at * element, here * element);
      for (const std::byte*& input : inputs_) input += here * element;
    }
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  Scales scales_;
  Slice mine_;
  size_t done_ = 0;
  bool written_ = false;
  Ahead ahead_ = Ahead::nothing;
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte*> outputs_;
  std::vector<std::byte> tile_;
};

}  // namespace

constinit extern const PathRow kMapped{
    .name = "mapped",
    .make = make_path<Mapped>,
    .kinds = bit(Collective::all_reduce) | bit(Collective::reduce) | bit(Collective::gather),
    .least_bytes =
        [](Collective kind) { return kind == Collective::gather ? kHandedInBytes : size_t{0}; },
    .mapped = true,
    .usual = {.start = 1.5e-6, .byte = 1 / 50e9},
    // My part of every input is read, and stored to every output; or my input to the root's.
    .traffic = [](Collective kind, double) { return kind == Collective::gather ? 1.0 : 2.0; }};

}  // namespace farandole
