// Hierarchical: fold inside each host, all-reduce between hosts, spread inside.
//
//   host 0    0 ─── 1      Data are cut into as many parts as the smallest host has ranks. On each
//             ║     ║      host its j-th rank leads part j: it folds what its host's ranks have of
//             it
//   host 1    2 ─── 3      (─), reduces it with the leaders of part j on the other hosts (═), and
//                          gives the result to its host's ranks (─).
//
// Between hosts it is `direct`, with a host's partials instead of a rank's leaves. A partial is a
// node of the canonical tree over ranks all of which are on that host: the canonical order for any
// hosts. Where a host has one, its link carries everything once in each direction; otherwise the
// contributions as often as there are nodes, or, out of order, all of a host's ranks are one
// partial.
#include <algorithm>

#include "schedule/algorithms.h"
#include "schedule/fold_on_arrival.h"
#include "schedule/hosts.h"
#include "schedule/leaves.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

/// A partial and the ranks whose contributions it is, in their order.
struct HostPartial {
  Partial partial;
  std::vector<int> ranks;

  bool has(int rank) const { return std::ranges::find(ranks, rank) != ranks.end(); }
};

/// In canonical order.
std::vector<HostPartial> nodes_of(const Hosts& hosts) {
  std::vector<HostPartial> nodes;
  for (const Partial& partial : partials_of(hosts.of)) {
    HostPartial& node = nodes.emplace_back(HostPartial{partial, {}});
    for (int r = partial.begin; r < partial.end; ++r) node.ranks.push_back(r);
  }
  return nodes;
}

/// One for each host.
std::vector<HostPartial> whole_hosts(const Hosts& hosts) {
  std::vector<HostPartial> all;
  for (int h = 0; h < hosts.count(); ++h)
    all.push_back({{h, h, h + 1}, hosts.ranks[static_cast<size_t>(h)]});
  return all;
}

/// Adds one rank's steps to reduce one chunk after the other.
class Hierarchy {
 public:
  Hierarchy(const Shape& shape, std::vector<HostPartial> (*divide)(const Hosts&))
      : rank_(shape.rank),
        hosts_(hosts_of(shape)),
        host_(hosts_.of[static_cast<size_t>(rank_)]),
        here_(hosts_.ranks[static_cast<size_t>(host_)]),
        place_(index_of(rank_, here_)),
        leaders_(hosts_.smallest()) {
    for (HostPartial& node : divide(hosts_)) {
      Partial partial = node.partial;
      if (leads()) {  // the owner is the host's leader of this rank's part
        partial.owner = leader(node.partial.owner);
        partial.is_scaled = node.ranks.size() > 1 || node.ranks.front() != partial.owner;
      }
      partials_.push_back(partial);
      if (node.partial.owner == host_) own_.push_back(std::move(node));
    }
  }

  /// Elements of scratch for chunks of at most `chunk` elements.
  size_t scratch(size_t chunk) const {
    if (!leads()) return 0;
    const Slice largest{.count = chunk};
    const Slice data = part(largest, leaders(), 0);
    const size_t inside = (here_.size() - 1) * data.count;
    const size_t between = partials_.size() * share(data, 0).count;
    return own_.size() * data.count + std::max(inside, between);
  }

  /// `chunk` is in input.
  void add_to(Lane& lane, Slice chunk, size_t scratch) const {
    fold_inside(lane, chunk, scratch);
    if (leads()) all_reduce_between(lane, part_of(chunk, place_), scratch);
    spread_inside(lane, chunk);
  }

 private:
  static size_t index_of(int rank, const std::vector<int>& ranks) {
    return static_cast<size_t>(std::ranges::find(ranks, rank) - ranks.begin());
  }

  bool leads() const { return place_ < leaders_; }
  int leaders() const { return static_cast<int>(leaders_); }
  Slice part_of(Slice chunk, size_t place) const {
    return part(chunk, leaders(), static_cast<int>(place));
  }
  Slice share(Slice data, int host) const { return part(data, hosts_.count(), host); }
  /// `turns` away on this host, by place.
  size_t right(size_t turns) const { return (place_ + turns) % here_.size(); }
  size_t left(size_t turns) const { return (place_ + here_.size() - turns) % here_.size(); }

  // ---- where things lie: own partials in rows of scratch, what waits to be folded behind them
  // ----

  /// Own partial q of `slice`, which is of `data`, this rank's part.
  Slice own_place(size_t q, Slice slice, Slice data, size_t scratch) const {
    if (own_[q].has(rank_)) return own_[q].ranks.size() == 1 ? slice : in(Space::output, slice);
    return {Space::scratch, scratch + q * data.count + slice.offset - data.offset, slice.count};
  }
  size_t slots(Slice data, size_t scratch) const { return scratch + own_.size() * data.count; }

  // ---- the three phases ----

  /// In turn k a rank sends k places to the right and receives from k to the left.
  void fold_inside(Lane& lane, Slice chunk, size_t scratch) const {
    const Slice data = leads() ? part_of(chunk, place_) : Slice{};
    std::vector<std::vector<Partial>> leaves;  // by own partial
    std::vector<FoldOnArrival> folds;
    if (leads()) {
      leaves.reserve(own_.size());
      for (size_t q = 0; q < own_.size(); ++q) {
        leaves.push_back(leaves_of(own_[q].ranks));
        folds.push_back(fold_of_own(lane, q, leaves.back(), data, scratch));
      }
    }
    for (size_t k = 1; k < here_.size(); ++k) {
      Step step;
      if (right(k) < leaders_) step = {.to = here_[right(k)], .send = part_of(chunk, right(k))};
      if (!leads()) {
        add(lane, step);
        continue;
      }
      step.from = here_[left(k)];
      const auto has = [&](const HostPartial& own) { return own.has(step.from); };
      const auto own = std::ranges::find_if(own_, has);
      folds[static_cast<size_t>(own - own_.begin())].arrive(step, index_of(step.from, own->ranks));
    }
  }

  static std::vector<Partial> leaves_of(const std::vector<int>& ranks) {
    std::vector<Partial> leaves;
    for (const int rank : ranks) {
      const int i = static_cast<int>(leaves.size());
      leaves.push_back({rank, i, i + 1});
    }
    return leaves;
  }

  FoldOnArrival fold_of_own(Lane& lane, size_t q, std::span<const Partial> leaves, Slice data,
                            size_t scratch) const {
    const auto slot = [&](size_t i) -> Slice {
      const size_t place = index_of(own_[q].ranks[i], here_);
      const size_t row = place - (place > place_ ? 1 : 0);  // this rank needs none
      return {Space::scratch, slots(data, scratch) + row * data.count, data.count};
    };
    return {
        lane, rank_, leaves, own_place(q, data, data, scratch), slot, [&](size_t) { return data; },
        false};
  }

  /// The same over hosts. `data` is this rank's part.
  void all_reduce_between(Lane& lane, Slice data, size_t scratch) const {
    const int hosts = hosts_.count();
    const Slice mine = share(data, host_);
    const auto slot = [&](size_t i) -> Slice {
      return {Space::scratch, slots(data, scratch) + i * mine.count, mine.count};
    };
    FoldOnArrival fold(lane, rank_, partials_, in(Space::output, mine), slot,
                       [&](size_t q) { return own_place(q, mine, data, scratch); });
    for (int k = 1; k < hosts; ++k) {
      const int to = (host_ + k) % hosts, from = leader((host_ + hosts - k) % hosts);
      std::vector<size_t> theirs;
      for (size_t i = 0; i < partials_.size(); ++i)
        if (partials_[i].owner == from) theirs.push_back(i);
      for (size_t j = 0; j < std::max(own_.size(), theirs.size()); ++j) {
        Step step;
        if (j < own_.size())
          step = {.to = leader(to), .send = own_place(j, share(data, to), data, scratch)};
        step.from = j < theirs.size() ? from : kNobody;
        if (j < theirs.size())
          fold.arrive(step, theirs[j]);
        else
          add(lane, step);
      }
    }
    for (int k = 1; k < hosts; ++k) {
      const int to = (host_ + k) % hosts, from = (host_ + hosts - k) % hosts;
      add(lane, {.to = leader(to),
                 .send = in(Space::output, mine),
                 .from = leader(from),
                 .recv = in(Space::output, share(data, from))});
    }
  }

  /// The leader of this rank's part on that host.
  int leader(int host) const { return hosts_.ranks[static_cast<size_t>(host)][place_]; }

  void spread_inside(Lane& lane, Slice chunk) const {
    for (size_t k = 1; k < here_.size(); ++k) {
      Step step;
      if (leads())
        step = {.to = here_[right(k)], .send = in(Space::output, part_of(chunk, place_))};
      if (left(k) < leaders_) {
        step.from = here_[left(k)];
        step.recv = in(Space::output, part_of(chunk, left(k)));
      }
      add(lane, step);
    }
  }

  int rank_;
  Hosts hosts_;
  int host_;
  const std::vector<int>& here_;   // the ranks of this host
  size_t place_;                   // of this rank among them
  size_t leaders_;                 // on each host
  std::vector<Partial> partials_;  // of hosts
  std::vector<HostPartial> own_;   // this host's
};

Schedule plan_levels(const Shape& shape, const Hierarchy& hierarchy) {
  Schedule schedule;
  for (int l = 0; l < shape.lanes; ++l) {
    const Slice data = lane_data(shape, l);
    Lane lane;
    for (int s = 0; s < shape.segments; ++s)
      hierarchy.add_to(lane, part(data, shape.segments, s), schedule.scratch);
    schedule.scratch += hierarchy.scratch(part(data, shape.segments, 0).count);
    schedule.lanes.push_back(std::move(lane));
  }
  return schedule;
}

}  // namespace

Schedule hierarchical_all_reduce(const Shape& shape) {
  return plan_levels(shape, Hierarchy(shape, nodes_of));
}

Schedule whole_host_all_reduce(const Shape& shape) {
  return plan_levels(shape, Hierarchy(shape, whole_hosts));
}

/// The largest host's ranks take longest inside; between hosts all leaders share the links.
Cost hierarchical_all_reduce_cost(const Shape& shape) {
  const Hosts hosts = hosts_of(shape);
  const double others = hosts.count() - 1, count = static_cast<double>(shape.count);
  const double inside =
      static_cast<double>(hosts.ranks[static_cast<size_t>(hosts.largest())].size()) - 1;
  const double part = count / static_cast<double>(hosts.smallest());
  return {.rounds = 2 * others * shape.segments,
          .bytes = 2 * others / hosts.count() * count,
          .folds = (inside + others / hosts.count()) * part,
          .inner_rounds = 2 * inside * shape.segments,
          .inner_bytes = 2 * inside * part};
}

}  // namespace farandole
