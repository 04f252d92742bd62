#include "devices/step_plan.h"

#include <algorithm>

#include "schedule/cut.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// The distance of two ranks' shares is a multiple of this, in elements, so all are aligned alike
/// modulo 16 bytes.
constexpr size_t kAlike = 16;

/// Whether a bucket holds a share for each rank side by side; else it holds one stretch.
bool has_places(const StepShape& s) {
  return s.updates || s.kind == Collective::reduce_scatter || s.kind == Collective::all_to_all ||
         s.kind == Collective::scatter;
}

/// Elements of all that is cut: the whole, or the longest share.
size_t length_of(const StepShape& s) {
  if (s.updates) return part({Space::input, 0, s.shape.count}, s.shape.size, 0).count;
  return is_cut_by_elements(s.kind) ? s.shape.count : largest_share(s.kind, s.shape);
}

/// Elements that a piece takes, of the whole or of each share.
size_t most_of(const StepShape& s) {
  const size_t room = s.piece_bytes / s.element;
  if (!has_places(s)) return room;
  const size_t each = room / static_cast<size_t>(s.shape.size);
  const size_t grain = s.tile > 0 ? s.tile : kAlike;
  return std::max<size_t>(1, each >= grain ? each / grain * grain : each);
}

struct Cutting {
  const StepShape& s;
  StepPiece piece;
  size_t most, begin;

  Cutting(const StepShape& step, size_t index)
      : s(step), most(most_of(step)), begin(index * most) {}

  int me() const { return s.shape.rank; }
  bool is_root() const { return me() == s.shape.root; }
  /// The elements of a share that are in this piece, where the share lies.
  Slice of(Slice share) const { return clip(share, {share.space, share.offset + begin, most}); }
  size_t place(int r) const { return static_cast<size_t>(r) * most; }

  void bring(Slice from, size_t to) {
    if (from.count == 0) return;
    piece.in.push_back({from.offset * s.element, to * s.element, from.count * s.element, me()});
  }
  void take(int rank, size_t from, Slice to) {
    if (to.count == 0) return;
    piece.out.push_back({from * s.element, to.offset * s.element, to.count * s.element, rank});
  }
  Slice whole() const { return of({Space::input, 0, s.shape.count}); }

  /// Every rank folds a part, to buckets.
  void cut_parts(int to) {
    const Slice mine = part({Space::input, 0, whole().count}, s.shape.size, me());
    piece.first = mine.offset;
    piece.count = mine.count;
    piece.folds_to = to;
  }
  /// Where this rank's part stays, nobody else touches it: only elements before and behind it move.
  void all_reduce() {
    cut_parts(kFoldsToAllBuckets);
    if (!s.own_stays) {
      bring(whole(), 0);
      return take(me(), 0, whole());
    }
    piece.own_stays = true;
    piece.own_from = piece.own_to = (begin + piece.first) * s.element;
    const size_t behind = piece.first + piece.count;
    const Slice others[] = {{Space::input, begin, piece.first},
                            {Space::input, begin + behind, whole().count - behind}};
    for (const Slice& one : others) {
      bring(one, one.offset - begin);
      take(me(), one.offset - begin, one);
    }
  }
  /// A rank has the same part at every step, and gives the others what it has made of it.
  void update() {
    const auto part_of = [&](int r) {
      return of(part({Space::input, 0, s.shape.count}, s.shape.size, r));
    };
    for (int r = 0; r < s.shape.size; ++r) bring(part_of(r), place(r));
    piece.mine = part_of(me());
    piece.first = place(me());
    piece.count = piece.mine.count;
    piece.folds_to = me();
    if (s.tile > 0) return;
    for (int i = 1; i < s.shape.size; ++i) {
      const int r = (me() + i) % s.shape.size;
      take(me(), place(r), part_of(r));
    }
  }
  void reduce() {
    cut_parts(s.shape.root);
    bring(whole(), 0);
    if (is_root()) take(me(), 0, whole());
  }
  void reduce_scatter() {
    for (int r = 0; r < s.shape.size; ++r) bring(of(share_of(s.kind, s.shape, r)), place(r));
    piece.first = place(me());
    piece.count = of(share_of(s.kind, s.shape, me())).count;
    piece.fold_to = begin * s.element;
    if (!s.apart) return;
    piece.folds_to = me();  // from where it is taken to each
    take(me(), place(me()), of({Space::output, 0, share_of(s.kind, s.shape, me()).count}));
  }
  void bring_share() { bring(of({Space::input, 0, share_of(s.kind, s.shape, me()).count}), 0); }
  void take_shares() {
    for (int i = 1; i <= s.shape.size; ++i) {  // not all from one at a time
      const int r = (me() + i) % s.shape.size;
      take(r, 0, of(share_of(s.kind, s.shape, r)));
    }
  }
  void all_gather() {
    bring_share();
    take_shares();
  }
  void gather() {
    bring_share();
    if (is_root()) take_shares();
  }
  void broadcast() {
    if (is_root()) bring(whole(), 0);
    if (!is_root() || !s.in_place) take(s.shape.root, 0, whole());
  }
  void scatter() {
    for (int r = 0; is_root() && r < s.shape.size; ++r)
      bring(of(share_of(s.kind, s.shape, r)), place(r));
    take(s.shape.root, place(me()), of({Space::output, 0, share_of(s.kind, s.shape, me()).count}));
  }
  void all_to_all() {
    for (int r = 0; r < s.shape.size; ++r) bring(of(block_sent(s.shape, me(), r)), place(r));
    for (int i = 1; i <= s.shape.size; ++i) {
      const int r = (me() + i) % s.shape.size;
      take(r, place(me()), of(block_received(s.shape, r, me())));
    }
  }
};

}  // namespace

bool has_steps(Collective kind) {
  return kind != Collective::barrier && kind != Collective::send && kind != Collective::recv;
}

size_t amount_of(Collective kind, const Shape& shape) {
  if (is_cut_by_elements(kind)) return shape.count;
  if (kind != Collective::all_to_all) return all_shares(kind, shape);
  return largest_share(kind, shape) * static_cast<size_t>(shape.size);
}

size_t pieces_of(const StepShape& step) {
  const size_t most = most_of(step);
  return (length_of(step) + most - 1) / most;
}

StepPiece piece_of(const StepShape& step, size_t index) {
  Cutting cutting(step, index);
  if (step.updates) {
    cutting.update();
    return std::move(cutting.piece);
  }
  switch (step.kind) {
    case Collective::all_reduce:
      cutting.all_reduce();
      break;
    case Collective::reduce_scatter:
      cutting.reduce_scatter();
      break;
    case Collective::all_gather:
      cutting.all_gather();
      break;
    case Collective::broadcast:
      cutting.broadcast();
      break;
    case Collective::reduce:
      cutting.reduce();
      break;
    case Collective::gather:
      cutting.gather();
      break;
    case Collective::scatter:
      cutting.scatter();
      break;
    default:
      cutting.all_to_all();
  }
  return std::move(cutting.piece);
}

Slice stretch_of(const StepShape& step, size_t index) {
  const Slice all{Space::input, 0, step.shape.count};
  return is_cut_by_elements(step.kind)
             ? clip(all, {all.space, index * most_of(step), most_of(step)})
             : all;
}

void lie_apart(StepPiece& piece, const Stretches& input, const Stretches& output) {
  std::vector<CudaMove> in, out;
  for (const CudaMove& move : piece.in)
    input.each(move.from, move.bytes, [&](uint64_t address, size_t at, size_t bytes) {
      in.push_back({address, move.to + at, bytes, move.rank});
    });
  for (const CudaMove& move : piece.out)
    output.each(move.to, move.bytes, [&](uint64_t address, size_t at, size_t bytes) {
      out.push_back({move.from + at, address, bytes, move.rank});
    });
  piece.in = std::move(in);
  piece.out = std::move(out);
}

}  // namespace farandole
