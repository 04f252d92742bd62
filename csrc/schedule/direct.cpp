// Direct: every rank sends chunk r to its owner r, which folds all of them in canonical order and,
// for all_reduce, sends the result to all. The least bytes, in canonical order, whatever the
// size; the price is a message for every pair. In turn k a rank sends k places to the right and
// receives from k to the left, so that no rank is ever the target of two.
#include <algorithm>

#include "schedule/algorithms.h"
#include "schedule/fold_on_arrival.h"
#include "schedule/leaves.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

struct Turn {
  int to, from;
};
Turn turn(const Shape& shape, int k) {
  return {(shape.rank + k) % shape.size, (shape.rank + shape.size - k) % shape.size};
}

/// Adds the steps that reduce one segment of a lane after the other.
class DirectReduce {
 public:
  DirectReduce(const Shape& shape, size_t scratch)
      : shape_(shape),
        partials_(partials_of(shape)),
        own_(shape, all_shares(Collective::reduce_scatter, shape), scratch) {
    by_rank_.resize(static_cast<size_t>(shape.size));
    for (size_t i = 0; i < partials_.size(); ++i)
      by_rank_[static_cast<size_t>(partials_[i].owner)].push_back(i);
  }

  /// Elements of scratch for own partials, and for each element of the rank's chunk.
  size_t scratch() const { return own_.scratch(); }
  size_t slots() const { return partials_.size() - (own_.number() > 0 ? 1 : 0); }

  /// `chunk(owner)` in input, `result` for the own one. Slots begin at `base`.
  template <typename Chunk>
  void add_to(Lane& lane, Chunk chunk, Slice result, size_t base) const {
    for (int owner = 0; owner < shape_.size; ++owner) own_.fold(lane, chunk(owner));
    const Slice mine = chunk(shape_.rank);
    const std::vector<size_t>& skipped = of(shape_.rank);
    const auto slot = [&](size_t i) -> Slice {
      if (!skipped.empty() && i == skipped.front()) return {};
      const size_t index = i - (!skipped.empty() && i > skipped.front() ? 1 : 0);
      return {Space::scratch, base + index * mine.count, mine.count};
    };
    FoldOnArrival fold(lane, shape_.rank, partials_, result, slot,
                       [&](size_t j) { return own_.place(j, mine); });
    for (int k = 1; k < shape_.size; ++k) {
      const auto [to, from] = turn(shape_, k);
      const std::vector<size_t>& theirs = of(from);
      for (size_t j = 0; j < std::max(own_.number(), theirs.size()); ++j) {
        Step step;
        if (j < own_.number()) step = {.to = to, .send = own_.place(j, chunk(to))};
        step.from = j < theirs.size() ? from : kNobody;
        if (j < theirs.size())
          fold.arrive(step, theirs[j]);
        else
          add(lane, step);
      }
    }
  }

 private:
  const std::vector<size_t>& of(int rank) const { return by_rank_[static_cast<size_t>(rank)]; }

  const Shape& shape_;
  std::vector<Partial> partials_;
  OwnPartials own_;
  std::vector<std::vector<size_t>> by_rank_;  // which partials
};

template <typename Chunk>
void add_pairwise_gather(Lane& lane, const Shape& shape, Chunk chunk) {
  for (int k = 1; k < shape.size; ++k) {
    const auto [to, from] = turn(shape, k);
    add(lane, {.to = to, .send = chunk(shape.rank), .from = from, .recv = chunk(from)});
  }
}

Slice folded_chunk(const Shape& shape, int owner, int lane, int segment) {
  return part(chunk_of(Collective::reduce_scatter, shape, owner, lane), shape.segments, segment);
}

/// Everybody's chunk is folded by its owner, into `result(chunk)`; then comes `then(lane, chunk)`,
/// where chunk(owner) is in input. Segments run one after the other, so that scratch, from
/// `scratch` on, holds all ranks' contributions to one segment.
template <typename Result, typename Then>
Schedule pairwise_reduce(const Shape& shape, size_t scratch, Result result, Then then) {
  const DirectReduce segment(shape, scratch);
  Schedule schedule{.scratch = scratch + segment.scratch()};
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    for (int s = 0; s < shape.segments; ++s) {
      const auto chunk = [&](int owner) { return folded_chunk(shape, owner, l, s); };
      segment.add_to(lane, chunk, result(chunk(shape.rank)), schedule.scratch);
      then(lane, chunk);
    }
    schedule.scratch += folded_chunk(shape, shape.rank, l, 0).count * segment.slots();
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

/// Every message waits for the one before, because a step ends only when its own has come.
Cost direct_cost(const Shape& shape, double phases, size_t chunk, bool folds) {
  const double others = shape.size - 1, each = static_cast<double>(chunk);
  return {.rounds = phases * others * shape.segments,
          .bytes = phases * others * each,
          .folds = folds ? others * each : 0};
}

}  // namespace

Schedule direct_all_reduce(const Shape& shape) {
  const auto output = [](Slice chunk) { return in(Space::output, chunk); };
  return pairwise_reduce(shape, 0, output, [&](Lane& lane, auto chunk) {
    add_pairwise_gather(lane, shape, [&](int owner) { return output(chunk(owner)); });
  });
}

Schedule direct_reduce_scatter(const Shape& shape) {
  const size_t begin = share_of(Collective::reduce_scatter, shape, shape.rank).offset;
  const auto output = [&](Slice chunk) -> Slice {
    return {Space::output, chunk.offset - begin, chunk.count};
  };
  return pairwise_reduce(shape, 0, output, [](Lane&, auto) {});
}

/// The owners send what they have folded to the root; theirs lies in scratch.
Schedule direct_reduce(const Shape& shape) {
  const Slice own = share_of(Collective::reduce_scatter, shape, shape.rank);
  const bool is_root = shape.rank == shape.root;
  const auto total = [&](Slice chunk) -> Slice {
    if (is_root) return in(Space::output, chunk);
    return {Space::scratch, chunk.offset - own.offset, chunk.count};
  };
  return pairwise_reduce(shape, is_root ? 0 : own.count, total, [&](Lane& lane, auto chunk) {
    if (!is_root) return add(lane, {.to = shape.root, .send = total(chunk(shape.rank))});
    for (int k = 1; k < shape.size; ++k) {
      const int from = turn(shape, k).from;
      add(lane, {.from = from, .recv = total(chunk(from))});
    }
  });
}

Schedule direct_all_gather(const Shape& shape) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    for (int s = 0; s < shape.segments; ++s) {
      const auto chunk = [&](int owner) {
        const Slice whole = chunk_of(Collective::all_gather, shape, owner, l);
        return part(in(Space::output, whole), shape.segments, s);
      };
      add(lane, {.to = shape.rank,
                 .send = part(own_chunk(Collective::all_gather, shape, Space::input, l),
                              shape.segments, s),
                 .from = shape.rank,
                 .recv = chunk(shape.rank)});
      add_pairwise_gather(lane, shape, chunk);
    }
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

Cost direct_all_reduce_cost(const Shape& shape) {
  return direct_cost(shape, 2, largest_share(Collective::reduce_scatter, shape), true);
}

Cost direct_reduce_scatter_cost(const Shape& shape) {
  return direct_cost(shape, 1, largest_share(Collective::reduce_scatter, shape), true);
}

/// The root takes the others' chunks one after the other.
Cost direct_reduce_cost(const Shape& shape) {
  Cost cost = direct_cost(shape, 2, largest_share(Collective::reduce_scatter, shape), true);
  cost.rounds = static_cast<double>(shape.size) * shape.segments;
  cost.messages = static_cast<double>(shape.size - 2) * shape.segments;
  return cost;
}

Cost direct_all_gather_cost(const Shape& shape) {
  return direct_cost(shape, 1, largest_share(Collective::all_gather, shape), false);
}

}  // namespace farandole
