// staged: any collective over memory of any kind. Data go in blocks through three stages, several
// blocks in flight:
//
//   publish  copy what others will read into my staging memory (not if they map my input)
//   fold     read the others' inputs: fold my part of the block, or copy it to its place
//   gather   copy the parts that others folded from their staging memory (all_reduce only)
//
// Each rank announces how many blocks it has brought through each stage; a slot of staging memory
// is used again kStagingDepth blocks later, when the slowest reader has announced that it is past.
// A slot of the last operation is free because its readers have all started this one.
#include <algorithm>
#include <cstring>

#include "base/fault.h"
#include "engine/direct_path.h"
#include "fold/fold.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

class Staged : public DirectPath {
 public:
  explicit Staged(const StreamMemory& memory)
      : memory_(memory), inputs_(static_cast<size_t>(memory.size())) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    element_ = size_of(operation.input.dtype);
    const size_t chunk = kStagingChunk / element_;
    const auto size = static_cast<size_t>(memory_.size());
    // reduce_scatter: a block is a chunk of every rank's part; else `size` chunks of the whole.
    const bool by_part = operation.kind == Collective::reduce_scatter;
    block_count_ = by_part ? chunk : chunk * size;
    const size_t longest =
        by_part ? (operation.input.count + size - 1) / size : operation.input.count;
    blocks_ = (longest + block_count_ - 1) / block_count_;
    published_ = folded_ = gathered_ = 0;
  }

  Progress poll(TimePoint until) override {
    bool moved = false;
    for (bool again = true; again;) {
      again = step(published_, &Staged::may_publish, &Staged::publish_block);
      again |= step(folded_, &Staged::may_fold, &Staged::fold_block);
      again |= step(gathered_, &Staged::may_gather, &Staged::gather_block);
      moved |= again;
      if (finished()) return Progress::finished;
      if (again && now() >= until) break;
    }
    return moved ? Progress::moved : Progress::idle;
  }

 private:
  Collective kind() const { return what_.operation().kind; }
  bool is_reader() const {
    return kind() != Collective::broadcast || what_.operation().root != memory_.rank;
  }
  bool is_shown(int r) const {
    return kind() != Collective::broadcast || what_.operation().root == r;
  }

  bool step(uint64_t& block, bool (Staged::*may)(uint64_t) const, void (Staged::*run)(uint64_t)) {
    if (block >= blocks_ || !(this->*may)(block)) return false;
    (this->*run)(block);
    ++block;
    return true;
  }

  bool all_reached(Word StreamPage::* word, uint64_t count) const {
    for (int r = 0; r < memory_.size(); ++r)
      if (r != memory_.rank && !reached(memory_.page(r).*word, progress(memory_.sequence(), count)))
        return false;
    return true;
  }

  bool finished() const {
    if (published_ < blocks_ || folded_ < blocks_ || gathered_ < blocks_) return false;
    // Peers that read my input where it lies must be done with it.
    return !what_.mine_is_shared() || all_reached(&StreamPage::folded, blocks_);
  }

  // ---- publish ----

  bool may_publish(uint64_t b) const {
    return b < kStagingDepth || all_reached(&StreamPage::folded, b - kStagingDepth + 1);
  }

  void publish_block(uint64_t b) {
    if (is_shown(memory_.rank) && !what_.mine_is_shared()) {
      std::byte* slot = input_staging(&memory_.mine(), memory_.size(), b);
      if (splits()) {
        for (int r = 0; r < memory_.size(); ++r)
          if (r != memory_.rank) copy(slot + chunk_at(r), input(memory_.rank), piece(b, r));
      } else {
        copy(slot, input(memory_.rank), block(b));
      }
    }
    fault_point("staged.publish");
    publish(memory_.mine().published, progress(memory_.sequence(), b + 1));
  }

  // ---- fold ----

  bool may_fold(uint64_t b) const {
    if (is_reader() && !all_published(b + 1)) return false;
    return !gathers() || b < kStagingDepth ||
           all_reached(&StreamPage::gathered, b - kStagingDepth + 1);
  }

  bool all_published(uint64_t count) const {
    for (int r = 0; r < memory_.size(); ++r)
      if (r != memory_.rank && is_shown(r) && what_.input_of(r) == nullptr &&
          !reached(memory_.page(r).published, progress(memory_.sequence(), count)))
        return false;
    return true;
  }

  void fold_block(uint64_t b) {
    const Operation& o = what_.operation();
    if (splits()) {
      fold_my_piece(b);
    } else if (kind() == Collective::all_gather) {
      for (int r = 0; r < memory_.size(); ++r)
        take_block(b, r, o.output.data + static_cast<size_t>(r) * o.input.bytes());
    } else {
      take_block(b, o.root, o.output.data);
    }
    fault_point("staged.fold");
    publish(memory_.mine().folded, progress(memory_.sequence(), b + 1));
  }

  void fold_my_piece(uint64_t b) {
    const Operation& o = what_.operation();
    const Slice mine = piece(b, memory_.rank);
    for (int r = 0; r < memory_.size(); ++r) {
      const std::byte* whole = input(r);
      inputs_[static_cast<size_t>(r)] =
          whole != nullptr
              ? whole + mine.offset * element_
              : input_staging(&memory_.page(r), memory_.size(), b) + chunk_at(memory_.rank);
    }
    const size_t base = gathers() ? 0 : part(everything(), memory_.size(), memory_.rank).offset;
    std::byte* outputs[] = {o.output.data + (mine.offset - base) * element_,
                            result_staging(&memory_.mine(), memory_.size(), b)};
    fold_canonical_to({outputs, gathers() ? 2u : 1u}, inputs_, mine.count, o.input.dtype, o.op,
                      scales_);
  }

  /// Copies rank r's block to its place in `whole`.
  void take_block(uint64_t b, int r, std::byte* whole) {
    const Slice s = block(b);
    const std::byte* from = input(r) != nullptr
                                ? input(r) + s.offset * element_
                                : input_staging(&memory_.page(r), memory_.size(), b);
    std::byte* to = whole + s.offset * element_;
    if (to != from) std::memcpy(to, from, s.count * element_);
  }

  // ---- gather ----

  bool may_gather(uint64_t b) const {
    return !gathers() || all_reached(&StreamPage::folded, b + 1);
  }

  void gather_block(uint64_t b) {
    if (!gathers()) return;
    for (int r = 0; r < memory_.size(); ++r) {
      if (r == memory_.rank) continue;
      const Slice theirs = piece(b, r);
      std::memcpy(what_.operation().output.data + theirs.offset * element_,
                  result_staging(&memory_.page(r), memory_.size(), b), theirs.count * element_);
    }
    fault_point("staged.gather");
    publish(memory_.mine().gathered, progress(memory_.sequence(), b + 1));
  }

  // ---- where things are ----

  bool gathers() const { return kind() == Collective::all_reduce; }
  bool splits() const { return gathers() || kind() == Collective::reduce_scatter; }
  Slice everything() const { return {Space::input, 0, what_.operation().input.count}; }
  static size_t chunk_at(int r) { return static_cast<size_t>(r) * kStagingChunk; }

  Slice block(uint64_t b) const {
    const size_t begin = b * block_count_;
    return {Space::input, begin, std::min(block_count_, everything().count - begin)};
  }

  /// The part of block b that rank r folds.
  Slice piece(uint64_t b, int r) const {
    if (gathers()) return part(block(b), memory_.size(), r);
    const Slice whole = part(everything(), memory_.size(), r);
    const size_t begin = std::min(b * block_count_, whole.count);
    return {Space::input, whole.offset + begin, std::min(block_count_, whole.count - begin)};
  }

  /// Rank r's input as mapped here; null when it comes through staging memory.
  const std::byte* input(int r) const {
    return r == memory_.rank ? what_.operation().input.data : what_.input_of(r);
  }

  void copy(std::byte* to, const std::byte* from, Slice s) const {
    std::memcpy(to, from + s.offset * element_, s.count * element_);
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  Scales scales_;
  std::vector<const std::byte*> inputs_;
  size_t element_ = 1;
  size_t block_count_ = 1;
  uint64_t blocks_ = 0, published_ = 0, folded_ = 0, gathered_ = 0;
};

}  // namespace

std::unique_ptr<DirectPath> make_staged(const StreamMemory& memory) {
  return std::make_unique<Staged>(memory);
}

}  // namespace farandole
