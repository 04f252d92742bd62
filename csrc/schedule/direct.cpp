// Direct: everybody sends chunk r to its owner r, who folds all of them in canonical order and, for
// all_reduce, sends the result to everybody. The least bytes, in canonical order, whatever the
// size; the price is a message for every pair. In turn k a rank sends k places to the right and
// receives from k to the left, so that no rank is ever the target of two.
#include "schedule/algorithms.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// Builds the canonical tree over one chunk's contributions in whatever order they come: each is
/// folded with its sibling if that is there, and the result with its own sibling, and so on up;
/// otherwise it waits in its slot. About half the folds so happen on data that is just arriving.
class FoldOnArrival {
 public:
  /// `own` is the rank's raw contribution, `result` the place for the total and, before, for the
  /// subtree that has swallowed `own`; `slot(r)` holds the contribution of rank r.
  template <typename Slot>
  FoldOnArrival(Lane& lane, int rank, int size, Slice own, Slice result, Slot slot)
      : lane_(lane), rank_(rank), result_(result) {
    plant(0, size, slot);
    nodes_[leaf_[static_cast<size_t>(rank)]].place = own;
    nodes_[leaf_[static_cast<size_t>(rank)]].is_there = true;
  }

  /// The contribution of rank step.from comes with `step`, whose receiving half is filled in here.
  void arrive(Step step) {
    size_t node = leaf_[static_cast<size_t>(step.from)];
    step.leaf_arrived = true;
    const size_t sibling = nodes_[node].sibling;
    if (nodes_[sibling].is_there) {
      step.action = nodes_[node].is_upper ? Action::fold_upper : Action::fold_lower;
      node = fold_into(sibling, step);
    } else {
      step.recv = nodes_[node].place;
      nodes_[node].is_there = true;
    }
    add(lane_, step);
    while (nodes_[node].parent != kRoot && nodes_[nodes_[node].sibling].is_there)
      node = climb(node);
  }

 private:
  static constexpr size_t kRoot = static_cast<size_t>(-1);
  struct Node {
    size_t parent = kRoot, sibling = kRoot;
    Slice place{};
    bool is_upper = false, is_there = false;
  };

  template <typename Slot>
  size_t plant(int begin, int size, const Slot& slot) {
    const size_t id = nodes_.size();
    nodes_.emplace_back();
    if (size == 1) {
      nodes_[id].place = slot(begin);
      leaf_.push_back(id);
      return id;
    }
    const int lower_size = split_of(size);
    const size_t lower = plant(begin, lower_size, slot);
    const size_t upper = plant(begin + lower_size, size - lower_size, slot);
    nodes_[lower].parent = nodes_[upper].parent = id;
    nodes_[lower].sibling = upper;
    nodes_[upper].sibling = lower;
    nodes_[upper].is_upper = true;
    return id;
  }

  /// Completes `step`: what arrives is folded with `sibling`, and their parent is there.
  size_t fold_into(size_t sibling, Step& step) {
    const size_t parent = nodes_[sibling].parent;
    const bool total = nodes_[parent].parent == kRoot;
    const bool raw = nodes_[sibling].place.space == Space::input;
    step.held = nodes_[sibling].place;
    step.leaf_held = raw;
    step.recv = total || raw ? result_ : step.held;
    step.finish = total;
    nodes_[parent].place = step.recv;
    nodes_[parent].is_there = true;
    return parent;
  }

  size_t climb(size_t node) {
    Step step{.to = rank_,
              .send = nodes_[node].place,
              .from = rank_,
              .action = nodes_[node].is_upper ? Action::fold_upper : Action::fold_lower};
    const size_t parent = fold_into(nodes_[node].sibling, step);
    add(lane_, step);
    return parent;
  }

  Lane& lane_;
  int rank_;
  Slice result_;
  std::vector<Node> nodes_;
  std::vector<size_t> leaf_;  // by rank
};

struct Turn {
  int to, from;
};
Turn turn(const Shape& shape, int k) {
  return {(shape.rank + k) % shape.size, (shape.rank + shape.size - k) % shape.size};
}

/// One segment: `chunk(owner)` in input, `result` for the own one. Slots begin at `base`.
template <typename Chunk>
void add_reduce(Lane& lane, const Shape& shape, Chunk chunk, Slice result, size_t base) {
  const Slice own = chunk(shape.rank);
  FoldOnArrival fold(lane, shape.rank, shape.size, own, result, [&](int from) -> Slice {
    const int slot = from < shape.rank ? from : from - 1;
    return {Space::scratch, base + static_cast<size_t>(slot) * own.count, own.count};
  });
  for (int k = 1; k < shape.size; ++k) {
    const auto [to, from] = turn(shape, k);
    fold.arrive({.to = to, .send = chunk(to), .from = from});
  }
}

template <typename Chunk>
void add_gather(Lane& lane, const Shape& shape, Chunk chunk) {
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
Schedule reduce(const Shape& shape, size_t scratch, Result result, Then then) {
  Schedule schedule{.scratch = scratch};
  for (int l = 0; l < shape.lanes; ++l) {
    Lane lane;
    for (int s = 0; s < shape.segments; ++s) {
      const auto chunk = [&](int owner) { return folded_chunk(shape, owner, l, s); };
      add_reduce(lane, shape, chunk, result(chunk(shape.rank)), schedule.scratch);
      then(lane, chunk);
    }
    schedule.scratch +=
        folded_chunk(shape, shape.rank, l, 0).count * static_cast<size_t>(shape.size - 1);
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
  return reduce(shape, 0, output, [&](Lane& lane, auto chunk) {
    add_gather(lane, shape, [&](int owner) { return output(chunk(owner)); });
  });
}

Schedule direct_reduce_scatter(const Shape& shape) {
  const size_t begin = share_of(Collective::reduce_scatter, shape, shape.rank).offset;
  const auto output = [&](Slice chunk) -> Slice {
    return {Space::output, chunk.offset - begin, chunk.count};
  };
  return reduce(shape, 0, output, [](Lane&, auto) {});
}

/// The owners send what they have folded to the root; theirs lies in scratch.
Schedule direct_reduce(const Shape& shape) {
  const Slice own = share_of(Collective::reduce_scatter, shape, shape.rank);
  const bool is_root = shape.rank == shape.root;
  const auto total = [&](Slice chunk) -> Slice {
    if (is_root) return in(Space::output, chunk);
    return {Space::scratch, chunk.offset - own.offset, chunk.count};
  };
  return reduce(shape, is_root ? 0 : own.count, total, [&](Lane& lane, auto chunk) {
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
      add_gather(lane, shape, chunk);
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
