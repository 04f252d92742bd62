#include "backends/blocks.h"

#include <algorithm>

#include "schedule/slicing.h"

namespace farandole {
namespace {

bool shows_all_the_same(Collective kind) {
  switch (kind) {
    case Collective::broadcast:
    case Collective::send:
    case Collective::recv:
    case Collective::all_gather:
    case Collective::gather:
      return true;
    default:
      return false;
  }
}

}  // namespace

void Blocks::start(const DirectOperation& what, size_t chunk) {
  const Collective kind = what.operation().kind;
  const Shape& shape = what.shape();
  const auto size = static_cast<size_t>(shape.size);
  size_ = shape.size;
  rank_ = shape.rank;
  chunk_ = chunk;
  total_ = shape.count;
  in_common_ = shows_all_the_same(kind);
  two_phases_ = kind == Collective::all_reduce || kind == Collective::reduce;
  step_ = in_common_ || two_phases_ ? chunk * size : chunk;
  blocks_ = (longest_route(kind, shape) + step_ - 1) / step_;
  if (two_phases_) return;
  shown_.resize(size);
  taken_.resize(size);
  for (int r = 0; r < size_; ++r) {
    shown_[static_cast<size_t>(r)] = route(kind, shape, rank_, r).take;
    taken_[static_cast<size_t>(r)] = route(kind, shape, r, rank_);
  }
}

Slice Blocks::cut(Slice whole, uint64_t b) const {
  const size_t begin = std::min(b * step_, whole.count);
  return {whole.space, whole.offset + begin, std::min(step_, whole.count - begin)};
}

Slice Blocks::folded_by(int r, uint64_t b) const {
  return part(cut({Space::input, 0, total_}, b), size_, r);
}

Slice Blocks::shown_to(int to, uint64_t b) const {
  return two_phases_ ? folded_by(to, b) : cut(shown_[static_cast<size_t>(to)], b);
}

Route Blocks::taken_from(int from, uint64_t b) const {
  if (two_phases_) {
    const Slice mine = folded_by(rank_, b);
    return {mine, in(Space::output, mine)};
  }
  const Route& all = taken_[static_cast<size_t>(from)];
  return {cut(all.take, b), cut(all.put, b)};
}

}  // namespace farandole
