// one_shot: every rank shows all of its input, in its page or where it lies; posting the operation
// says that it is there. Everybody then finishes alone.
#include <cstring>

#include "engine/direct_path.h"
#include "fold/fold.h"

namespace farandole {
namespace {

class OneShot : public DirectPath {
 public:
  explicit OneShot(const StreamMemory& memory)
      : memory_(memory), inputs_(static_cast<size_t>(memory.size())) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    read_ = false;
    const bool alone = memory_.size() == 1;
    if (alone || !what_.is_read(memory_.rank) || what_.mine_is_shared()) return;
    if (operation.input.count == 0) return;
    std::memcpy(memory_.mine().one_shot[memory_.sequence() % 2], operation.input.data,
                operation.input.bytes());
  }

  Progress poll(TimePoint) override {
    const uint64_t done = progress(memory_.sequence(), 1);
    const Operation& o = what_.operation();
    if (!read_) {
      read_everything();
      read_ = true;
      publish(memory_.mine().folded, done);
    }
    if (memory_.size() == 1 || !what_.mine_is_shared()) return Progress::finished;
    // Peers read my input where it lies: it is mine again when all have.
    for (int r = 0; r < memory_.size(); ++r)
      if (!reached(memory_.page(r).folded, done)) return Progress::idle;
    if (writes_later()) std::memcpy(o.output.data, later_.data(), o.output.bytes());
    return Progress::finished;
  }

 private:
  /// The result would overwrite what peers are reading.
  bool writes_later() const {
    const Operation& o = what_.operation();
    return memory_.size() > 1 && what_.mine_is_shared() && o.kind == Collective::all_reduce &&
           o.input.data == o.output.data;
  }

  void read_everything() {
    const Operation& o = what_.operation();
    for (int r = 0; r < memory_.size(); ++r) {
      const std::byte* mapped = r == memory_.rank ? o.input.data : what_.input_of(r);
      inputs_[static_cast<size_t>(r)] =
          mapped != nullptr ? mapped : memory_.page(r).one_shot[memory_.sequence() % 2];
    }
    if (writes_later()) later_.resize(kOneShotBytes);
    what_.finish(inputs_, scales_for(o.input.dtype, o.op, o.prescale, o.postscale, memory_.size()),
                 writes_later() ? later_.data() : o.output.data);
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte> later_;
  bool read_ = false;
};

}  // namespace

std::unique_ptr<DirectPath> make_one_shot(const StreamMemory& memory) {
  return std::make_unique<OneShot>(memory);
}

}  // namespace farandole
