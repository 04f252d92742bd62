// Collectives that fold nothing: all-gather (Bruck), broadcast (scatter, then a ring), barrier
// (dissemination). Nothing is scaled here. Ring, direct and binomial forms live with their like.
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// Shares [begin, begin + shares) in output, cyclically, in the pieces that lie in one stretch of
/// one lane: at most two for a single lane, otherwise one for each share.
std::vector<Slice> stretch(const Shape& shape, int lane, int begin, int shares) {
  const auto share = [&](int r) {
    return in(Space::output, chunk_of(Collective::all_gather, shape, r, lane));
  };
  std::vector<Slice> pieces;
  if (shape.lanes == 1) {
    const int end = begin + shares, before_end = std::min(end, shape.size);
    pieces = {join(share(begin), share(before_end - 1))};
    if (end > shape.size) pieces.push_back(join(share(0), share(end - shape.size - 1)));
  } else {
    for (int r = begin; r < begin + shares; ++r) pieces.push_back(share(r % shape.size));
  }
  return pieces;
}

/// Distances 1, 2, 4 … while `visit(distance)` is wanted.
template <typename Visit>
void each_distance(int size, Visit visit) {
  for (int distance = 1; distance < size; distance *= 2) visit(distance);
}

}  // namespace

/// Before the round at distance d a rank has the d chunks from its own on. It sends them d to the
/// left and gets the next d from the right, straight to their place. Not cut in segments: a round
/// needs all of the one before.
Schedule bruck_all_gather(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    add(lane, {.to = shape.rank,
               .send = own_chunk(Collective::all_gather, shape, Space::input, l),
               .from = shape.rank,
               .recv = stretch(shape, l, shape.rank, 1).front()});
    each_distance(shape.size, [&](int distance) {
      const int chunks = std::min(distance, shape.size - distance);
      const int left = (shape.rank - distance + shape.size) % shape.size;
      const int right = (shape.rank + distance) % shape.size;
      const auto out = stretch(shape, l, shape.rank, chunks);
      const auto arriving = stretch(shape, l, right, chunks);
      // A rank whose own stretch is cut in two sends the first piece before it waits for anything.
      const size_t ahead = out.size() > arriving.size() ? 1 : 0;
      for (size_t i = 0; i < ahead; ++i) add(lane, {.to = left, .send = out[i]});
      for (size_t i = 0; i < arriving.size(); ++i)
        add(lane, {.to = left,
                   .send = i + ahead < out.size() ? out[i + ahead] : Slice{},
                   .from = right,
                   .recv = arriving[i]});
    });
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// Down a binomial tree every rank is sent the chunks of its subtree; then a ring passes around
/// what is still missing. Ranks are counted from the root, which sends about twice the data instead
/// of log2(size) times.
Schedule scatter_ring_broadcast(const Shape& shape) {
  const BinomialTree tree{shape.size};
  const int size = shape.size, me = (shape.rank - shape.root + size) % size;
  const auto real = [&](int r) { return r == kNobody ? r : (r + shape.root) % size; };
  const auto was_sent = [&](int r, int chunk) { return chunk >= r && chunk < tree.end(r); };
  const Space source = me == 0 ? Space::input : Space::output;
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    const Slice data = in(Space::output, lane_data(shape, l));
    const auto subtree = [&](int r) {
      return join(part(data, size, r), part(data, size, tree.end(r) - 1));
    };
    add(lane, {.from = real(tree.parent(me)), .recv = subtree(me)}, shape.segments);
    tree.descending(me, [&](int child) {
      add(lane, {.to = real(child), .send = in(source, subtree(child))}, shape.segments);
    });
    const int left = (me + size - 1) % size, right = (me + 1) % size;
    for (int k = 0; k < size - 1; ++k) {
      const int out = (me - k + size) % size, mine = (me - k - 1 + size) % size;
      Step step;
      if (!was_sent(right, out)) {
        step.to = real(right);
        step.send = in(source, part(data, size, out));
      }
      if (!was_sent(me, mine)) {
        step.from = real(left);
        step.recv = part(data, size, mine);
      }
      add(lane, step, shape.segments);
    }
    if (me == 0)
      add(lane, {.to = shape.rank, .send = in(source, data), .from = shape.rank, .recv = data});
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// In the round at distance d every rank sends a token d to the right and waits for one from d to
/// the left. After it, each knows that 2d ranks have come. The token is one element whose value
/// means nothing: scratch[0] goes out, scratch[1] takes what comes. One lane, whatever the shape
/// says.
Schedule dissemination_barrier(const Shape& shape) {
  Schedule schedule{.lanes = {Lane{}}, .scratch = 2};
  each_distance(shape.size, [&](int distance) {
    add(schedule.lanes.front(), {.to = (shape.rank + distance) % shape.size,
                                 .send = {Space::scratch, 0, 1},
                                 .from = (shape.rank - distance + shape.size) % shape.size,
                                 .recv = {Space::scratch, 1, 1}});
  });
  return schedule;
}

/// In every round some rank waits for the longest stretch.
Cost bruck_all_gather_cost(const Shape& shape) {
  const auto longest = [&](int shares) {
    size_t most = 0;
    for (int begin = 0; begin < shape.size; ++begin) {
      size_t count = 0;
      for (const Slice& piece : stretch(shape, 0, begin, shares)) count += piece.count;
      most = std::max(most, count);
    }
    return static_cast<double>(most);
  };
  const double others = shape.size - 1;
  Cost cost{.rounds = shape.lanes == 1 ? ceil_log2(shape.size) : others};
  each_distance(shape.size, [&](int distance) {
    const int shares = std::min(distance, shape.size - distance);
    cost.bytes +=
        shape.counts.empty() ? static_cast<double>(shape.count) * shares : longest(shares);
  });
  return cost;
}

Cost scatter_ring_broadcast_cost(const Shape& shape) {
  const double others = shape.size - 1, share = others / shape.size;
  const double rounds = ceil_log2(shape.size) + others;
  return {.rounds = rounds, .bytes = 2 * static_cast<double>(shape.count) * share};
}

Cost dissemination_barrier_cost(const Shape& shape) {
  return {.rounds = static_cast<double>(ceil_log2(shape.size))};
}

}  // namespace farandole
