// one_shot: every rank shows all of its input, in its page or where it lies; everybody finishes
// alone. Posting the operation says that the first piece is there, the progress word `published`
// how many more: what is copied in, on its way and folded are different pieces.
//
// Slots go by the operation's number, modulo an even number: no two operations in a row have one in
// common. When operation k+2 overwrites the slots of k, every peer has started k+1, and so has
// finished reading k.
#include <algorithm>

#include "backends/paths.h"
#include "base/copy.h"
#include "base/fault.h"
#include "base/own_lines.h"
#include "fold/fold.h"

namespace farandole {
namespace {

class OneShot : public DirectPath {
 public:
  explicit OneShot(const StreamMemory& memory)
      : memory_(memory), inputs_(static_cast<size_t>(memory.size())) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    // Elsewhere inputs differ in length, or the output is no place by place image of them.
    piece_bytes_ = operation.kind == Collective::all_reduce ? kOneShotPiece : kOneShotBytes;
    pieces_ =
        operation.kind == Collective::all_reduce
            ? std::max<size_t>(1, (operation.input.bytes() + kOneShotPiece - 1) / kOneShotPiece)
            : 1;
    slots_ = goes_both_ways(operation.kind, what_.shape()) ? kOneShotSlotsBothWays : kOneShotSlots;
    my_slot_ = slot_of(memory_.rank);
    shown_ = read_ = 0;
    located_ = false;
    copies_ = what_.is_read(memory_.rank) && memory_.size() > 1 && !what_.mine_is_shared();
    if (!copies_ && pieces_ > 1) publish(memory_.mine().published, shown(pieces_));
    show();
  }

  bool show() override {
    if (!copies_ || shown_ == pieces_) return false;
    if (shown_ > 0) fault_point("one_shot.show");
    const Piece piece = piece_at(shown_);
    std::byte* slot = my_slot_ + piece.begin;
    own_lines(slot, piece.bytes);
    copy_bytes(slot, what_.operation().input.data + piece.begin, piece.bytes);
    if (shown_++ > 0) publish(memory_.mine().published, shown(shown_));
    return true;
  }

  Progress poll(TimePoint) override {
    if (!located_) locate();
    bool moved = false;
    while (read_ < pieces_) {
      moved |= show();
      if (!others_show(read_)) {
        if (copies_ && shown_ < pieces_) continue;
        return moved ? Progress::moved : Progress::idle;
      }
      read();
      moved = true;
    }
    if (memory_.size() == 1 || !what_.mine_is_shared()) return Progress::finished;
    // Peers read my input where it lies: it is mine again when all have.
    for (int r = 0; r < memory_.size(); ++r)
      if (!reached(memory_.page(r).folded, progress(memory_.sequence(), 1)))
        return moved ? Progress::moved : Progress::idle;
    const Operation& o = what_.operation();
    if (writes_later()) copy_bytes(o.output.data, later_.data(), o.output.bytes());
    return Progress::finished;
  }

  std::vector<int> lacking() const override {
    return read_ < pieces_ ? all_but(
                                 memory_, [&](int r) { return shows(r, read_); })
                           : not_folded(memory_, 1);
  }

 private:
  struct Piece {
    size_t begin, bytes;
  };
  Piece piece_at(size_t index) const {
    const size_t begin = index * piece_bytes_;
    return {begin, std::min(piece_bytes_, what_.operation().input.bytes() - begin)};
  }
  uint64_t shown(size_t pieces) const { return progress(memory_.sequence(), pieces); }
  std::byte* slot_of(int r) const {
    const uint32_t sequence = memory_.sequence();
    return memory_.home(r, sequence / slots_).one_shot[sequence % slots_];
  }

  bool others_show(size_t index) const {
    if (index == 0) return true;  // they have posted the operation
    for (int r = 0; r < memory_.size(); ++r)
      if (r != memory_.rank && !shows(r, index)) return false;
    return true;
  }
  bool shows(int r, size_t index) const {
    return index == 0 || reached(memory_.page(r).published, shown(index + 1));
  }

  void locate() {
    located_ = true;
    for (int r = 0; r < memory_.size(); ++r) {
      const std::byte* mapped = what_.readable_input_of(r);
      inputs_[static_cast<size_t>(r)] = mapped != nullptr ? mapped : slot_of(r);
    }
    if (writes_later()) later_.resize(kOneShotBytes);
  }

  /// The result would overwrite what peers are reading.
  bool writes_later() const {
    const Operation& o = what_.operation();
    return memory_.size() > 1 && what_.mine_is_shared() && o.kind == Collective::all_reduce &&
           o.input.data == o.output.data;
  }

  /// Folds the next piece of an all_reduce; other kinds have one.
  void read() {
    const Operation& o = what_.operation();
    std::byte* output = writes_later() ? later_.data() : o.output.data;
    if (o.kind != Collective::all_reduce) {
      what_.finish(inputs_, scales_, output);
      ++read_;
    } else {
      const Piece piece = piece_at(read_++);
      fold_canonical(output + piece.begin, inputs_, piece.bytes / size_of(o.input.dtype),
                     o.input.dtype, o.op, scales_);
      for (const std::byte*& input : inputs_) input += piece.bytes;
    }
    if (read_ == pieces_) publish(memory_.mine().folded, progress(memory_.sequence(), 1));
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  Scales scales_;
  std::vector<const std::byte*> inputs_;  // of the next piece
  std::vector<std::byte> later_;
  size_t piece_bytes_ = kOneShotPiece, pieces_ = 0, shown_ = 0, read_ = 0;
  uint32_t slots_ = 1;
  std::byte* my_slot_ = nullptr;
  bool copies_ = false;   // my input into my page
  bool located_ = false;  // where the others' inputs lie
};

}  // namespace

constinit extern const PathRow kOneShot{
    .name = "one_shot",
    .make = make_path<OneShot>,
    .most_bytes = kOneShotBytes,
    .agrees_by = AgreesBy::meanwhile,
    .alone = Alone::any_length,  // it has nobody to show anything to, and only works out the result
    .usual = {.start = 1.5e-6, .byte = 1 / 25e9},
    .traffic = [](Collective kind, double size) { return 1 + inputs_read(kind, size); }};

}  // namespace farandole
