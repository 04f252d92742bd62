// Memory that lies apart and counts as one: arrays that travel together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace farandole {

class Stretches {
 public:
  /// Appends memory to the whole.
  void add(uint64_t address, size_t bytes) {
    if (bytes > 0) all_.push_back({address, end_, bytes});
    end_ += bytes;
  }
  /// Leaves a gap up to this offset of the whole.
  void skip_to(size_t offset) { end_ = offset; }

  bool empty() const { return all_.empty(); }

  /// Calls visit(address, at, bytes) for what lies in [offset, offset + bytes) of the whole; `at`
  /// counts from there.
  template <typename Visit>
  void each(size_t offset, size_t bytes, Visit visit) const {
    auto next = std::ranges::upper_bound(all_, offset, {}, &Stretch::begin);
    if (next != all_.begin()) --next;
    for (; next != all_.end() && next->begin < offset + bytes; ++next) {
      const size_t from = std::max(offset, next->begin);
      const size_t to = std::min(offset + bytes, next->begin + next->bytes);
      if (from < to) visit(next->address + (from - next->begin), from - offset, to - from);
    }
  }

 private:
  struct Stretch {
    uint64_t address;
    size_t begin, bytes;
  };

  std::vector<Stretch> all_;
  size_t end_ = 0;
};

}  // namespace farandole
