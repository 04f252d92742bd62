// The world of a proof: what a cell of memory stands for, how folds are written down, and memory
// that knows which lanes have touched it.
#pragma once

#include <array>
#include <bit>
#include <string>
#include <unordered_map>
#include <vector>

#include "schedule/check.h"
#include "schedule/expectation.h"
#include "schedule/slicing.h"

namespace farandole {

/// A mistake in a schedule.
struct Fault {
  std::string what;
};

/// raw: a leaf's contribution as given. partial: scaled, perhaps folded. finished: postscaled.
enum class Stage : uint8_t { unset, raw, partial, finished };

struct Value {
  uint32_t expression = 0;
  uint32_t element = 0;
  Stage stage = Stage::unset;
};

/// Every expression of folds is kept once, so equal ones have equal numbers. Leaf r is number r.
class Expressions {
 public:
  explicit Expressions(int leaves) : words_((static_cast<size_t>(leaves) + 63) / 64) {
    for (int r = 0; r < leaves; ++r) {
      members_.resize(members_.size() + words_);
      members_[members_.size() - words_ + static_cast<size_t>(r) / 64] = uint64_t{1} << (r % 64);
    }
    canonical_ = tree(0, leaves);
  }

  uint32_t canonical() const { return canonical_; }

  /// lower ⊕ upper; throws when a leaf is in both.
  uint32_t fold(uint32_t lower, uint32_t upper) {
    const uint64_t key = uint64_t{lower} << 32 | upper;
    if (key == last_key_) return last_;  // the neighbouring element, nearly always
    const auto [found, is_new] = numbers_.try_emplace(key, 0);
    if (is_new) found->second = create(lower, upper);
    last_key_ = key;
    return last_ = found->second;
  }

  bool is_complete(uint32_t e) const { return std::equal(of(e), of(e) + words_, of(canonical_)); }

 private:
  using Word = std::vector<uint64_t>::const_iterator;
  Word of(uint32_t e) const { return members_.begin() + static_cast<std::ptrdiff_t>(e * words_); }

  uint32_t create(uint32_t lower, uint32_t upper) {
    const size_t number = members_.size() / words_;
    for (size_t w = 0; w < words_; ++w) {
      const uint64_t a = members_[lower * words_ + w], b = members_[upper * words_ + w];
      if ((a & b) != 0)
        throw Fault{"folds the contribution of leaf " +
                    std::to_string(w * 64 + static_cast<size_t>(std::countr_zero(a & b))) +
                    " a second time"};
      members_.push_back(a | b);
    }
    return static_cast<uint32_t>(number);
  }

  uint32_t tree(int begin, int size) {
    if (size == 1) return static_cast<uint32_t>(begin);
    const int lower = split_of(size);
    const uint32_t a = tree(begin, lower), b = tree(begin + lower, size - lower);
    return fold(a, b);
  }

  size_t words_;
  std::vector<uint64_t> members_;  // bit sets of leaves, `words_` for each expression
  std::unordered_map<uint64_t, uint32_t> numbers_;
  uint64_t last_key_ = ~uint64_t{0};
  uint32_t last_ = 0, canonical_ = 0;
};

/// One rank's memory: input, output and scratch as one row of cells, and which lanes touched them.
class Memory {
 public:
  static constexpr uint16_t kNoLane = 0xffff, kManyLanes = 0xfffe;

  Memory(const Extents& extents, size_t scratch, Buffers buffers)
      : extent_{extents.input, extents.output, scratch} {
    if (buffers == Buffers::in_place) {
      base_ = {extents.input_base, extents.output_base, 0};
      base_[2] = std::max(base_[0] + extent_[0], base_[1] + extent_[1]);
    } else {
      base_ = {0, extent_[0], extent_[0] + extent_[1]};
    }
    cells_.resize(base_[2] + scratch);
    marks_.resize(cells_.size());
  }

  bool contains(Slice s) const {
    const size_t extent = extent_[static_cast<size_t>(s.space)];
    return s.offset <= extent && s.count <= extent - s.offset;
  }
  size_t address(Slice s) const { return base_[static_cast<size_t>(s.space)] + s.offset; }
  bool same(Slice a, Slice b) const { return address(a) == address(b) && a.count == b.count; }
  bool overlap(Slice a, Slice b) const {
    return address(a) < address(b) + b.count && address(b) < address(a) + a.count;
  }

  Value* at(Slice s) { return cells_.data() + address(s); }

  void note_read(Slice s, uint16_t lane) {
    for (Mark *m = marks_.data() + address(s), *end = m + s.count; m != end; ++m) {
      if (m->writer != kNoLane && m->writer != lane) throw Fault{"reads what another lane writes"};
      m->reader = m->reader == kNoLane || m->reader == lane ? lane : kManyLanes;
    }
  }
  void note_write(Slice s, uint16_t lane) {
    for (Mark *m = marks_.data() + address(s), *end = m + s.count; m != end; ++m) {
      if (m->writer != kNoLane && m->writer != lane) throw Fault{"writes what another lane writes"};
      if (m->reader != kNoLane && m->reader != lane) throw Fault{"writes what another lane reads"};
      m->writer = lane;
    }
  }

 private:
  struct Mark {
    uint16_t reader = kNoLane, writer = kNoLane;
  };
  std::array<size_t, 3> extent_, base_{};
  std::vector<Value> cells_;
  std::vector<Mark> marks_;
};

}  // namespace farandole
