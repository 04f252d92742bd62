// How an operation is cut into pieces, from what all ranks know of it.
#pragma once

#include <vector>

#include "schedule/schedule.h"

namespace farandole {

/// An element of the result follows from the inputs' elements of the same place alone.
constexpr bool is_cut_by_elements(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::broadcast ||
         kind == Collective::reduce;
}
/// So it is within each rank's share, of which pieces have a part each: one of them does not lie
/// together.
constexpr bool is_cut_by_shares(Collective kind) {
  return kind == Collective::reduce_scatter || kind == Collective::all_gather;
}
/// Without changing any bits.
constexpr bool can_be_cut(Collective kind) {
  return is_cut_by_elements(kind) || is_cut_by_shares(kind);
}

/// An operation of the same kind, in elements.
struct CutPiece {
  struct Stretch {
    size_t at, count;  // of the whole array
  };
  size_t count = 0;            // as in a shape
  std::vector<size_t> counts;  // likewise
  std::vector<Stretch> input, output;
};

/// Elements of all of them.
size_t count_of(const std::vector<CutPiece::Stretch>& stretches);

class Cut {
 public:
  /// `elements`: of a piece, or of each rank's share of it.
  Cut(Collective kind, const Shape& shape, size_t elements);

  size_t pieces() const { return (longest_ + elements_ - 1) / elements_; }
  /// The first is the longest.
  CutPiece operator[](size_t index) const;

 private:
  Collective kind_;
  size_t elements_;
  size_t longest_;  // of what is cut
  std::vector<Slice> shares_;
  size_t rank_;
};

}  // namespace farandole
