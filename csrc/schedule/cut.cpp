#include "schedule/cut.h"

#include <algorithm>
#include <numeric>

#include "schedule/slicing.h"

namespace farandole {

size_t count_of(const std::vector<CutPiece::Stretch>& stretches) {
  return std::accumulate(
      stretches.begin(), stretches.end(), size_t{0},
      [](size_t sum, const CutPiece::Stretch& stretch) { return sum + stretch.count; });
}

Cut::Cut(Collective kind, const Shape& shape, size_t elements)
    : kind_(kind),
      elements_(elements),
      longest_(is_cut_by_shares(kind) ? largest_share(kind, shape) : shape.count),
      rank_(static_cast<size_t>(shape.rank)) {
  if (is_cut_by_shares(kind))
    for (int r = 0; r < shape.size; ++r) shares_.push_back(share_of(kind, shape, r));
}

CutPiece Cut::operator[](size_t index) const {
  const size_t from = index * elements_, to = std::min(from + elements_, longest_);
  CutPiece piece;
  if (is_cut_by_elements(kind_)) {
    piece.count = to - from;
    piece.input = piece.output = {{from, to - from}};
    return piece;
  }
  std::vector<CutPiece::Stretch> of_all;
  for (const Slice& share : shares_) {
    const size_t count = std::min(to, share.count) - std::min(from, share.count);
    piece.counts.push_back(count);
    of_all.push_back({share.offset + from, count});
  }
  const std::vector<CutPiece::Stretch> own = {{from, piece.counts[rank_]}};
  if (std::ranges::all_of(piece.counts, [&](size_t n) { return n == piece.counts.front(); })) {
    piece.count = kind_ == Collective::reduce_scatter ? count_of(of_all) : piece.counts.front();
    piece.counts.clear();
  }
  piece.input = kind_ == Collective::reduce_scatter ? of_all : own;
  piece.output = kind_ == Collective::reduce_scatter ? own : of_all;
  return piece;
}

}  // namespace farandole
