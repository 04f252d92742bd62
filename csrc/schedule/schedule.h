// A collective is a schedule; a schedule is data. These are its words.
//
//   rank 0, lane 0:  step 0          step 1          step 2        A lane runs its steps in order.
//   rank 0, lane 1:  step 0          step 1                        Lanes know nothing of each
//   other.
//
// A step sends one slice to one rank while it receives one slice from one rank; either half may be
// absent, and a half whose slice is empty is absent too: nothing travels and nothing is waited for.
// Order inside a lane is the only dependency.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace farandole {

/// Each rank's input and output, in elements. `count` and `counts` are the shape's; without counts
/// every rank has an equal share:
///
///   collective       input                        output
///   all_reduce       count                        count: the fold over all ranks
///   reduce_scatter   count (sum of counts)        part r of that fold; counts[r] of it
///   all_gather       count (counts[r])            every rank's input, in rank order
///   broadcast        count                        count: the root's input (only that is read)
///   barrier          nothing                      nothing: nobody leaves before all have come
///   reduce           count                        root: count, the fold; the others nothing
///   gather           count (counts[r])            root: every rank's input; the others nothing
///   scatter          root: a block for each rank  count (counts[r])
///   all_to_all       a block for each rank        a block from each rank, in rank order
///   send, recv       between two ranks: a broadcast on a stream of their own, by no planner of the
///   table
///
/// A block of all_to_all has `count` elements, or counts[from * size + to]. A rank with several
/// leaves has as many inputs, one after the other, for what folds.
enum class Collective : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  barrier,
  reduce,
  gather,
  scatter,
  all_to_all,
  send,
  recv,
};

inline constexpr std::array<std::string_view, 11> kCollectiveNames{
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "reduce",
    "gather",     "scatter",        "all_to_all", "send",      "recv"};

constexpr bool is_between_two(Collective kind) {
  return kind == Collective::send || kind == Collective::recv;
}

constexpr std::string_view name_of(Collective kind) {
  return kCollectiveNames[static_cast<size_t>(kind)];
}

constexpr std::optional<Collective> collective_named(std::string_view name) {
  for (size_t i = 0; i < kCollectiveNames.size(); ++i)
    if (kCollectiveNames[i] == name) return static_cast<Collective>(i);
  return std::nullopt;
}

/// How many entries Shape::counts has when shares differ; 0: this collective has no such form.
constexpr size_t counts_of(Collective kind, int size) {
  const auto ranks = static_cast<size_t>(size);
  switch (kind) {
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::gather:
    case Collective::scatter:
      return ranks;
    case Collective::all_to_all:
      return ranks * ranks;
    default:
      return 0;
  }
}

constexpr bool goes_in_place(Collective kind) { return kind != Collective::all_to_all; }

constexpr bool is_rooted(Collective kind) {
  return kind == Collective::broadcast || kind == Collective::reduce ||
         kind == Collective::gather || kind == Collective::scatter;
}

constexpr bool folds(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce_scatter ||
         kind == Collective::reduce;
}

/// Input is never written. In place, input and output are one memory: output[0] lies at input[0];
/// for all_gather and gather input[0] lies at the rank's own share of output, and for
/// reduce_scatter and scatter output[0] lies at the rank's own share of input. all_to_all is never
/// in place. Scratch starts unset.
enum class Space : uint8_t { input, output, scratch };

inline constexpr std::array<std::string_view, 3> kSpaceNames{"input", "output", "scratch"};
constexpr std::string_view name_of(Space space) { return kSpaceNames[static_cast<size_t>(space)]; }

/// In elements.
struct Slice {
  Space space = Space::output;
  size_t offset = 0;
  size_t count = 0;

  friend bool operator==(const Slice&, const Slice&) = default;
};

/// store: recv = arrived. fold_upper: recv = held ⊕ arrived. fold_lower: recv = arrived ⊕ held.
/// Data that arrived are the upper (lower) operand: operands are never swapped.
enum class Action : uint8_t { store, fold_upper, fold_lower };

inline constexpr std::array<std::string_view, 3> kActionNames{"store", "fold_upper", "fold_lower"};
constexpr std::string_view name_of(Action action) {
  return kActionNames[static_cast<size_t>(action)];
}

inline constexpr int kNobody = -1;

/// `send` is read, and `recv` is complete, within the step. The two never overlap, so that the step
/// may go in any interleaving. `held` is the same memory as `recv` or does not touch it.
/// to == from == the rank itself: a local step, in which `send` is what arrives; there `send` and
/// `recv` may be the same memory.
///
/// Scaling. Data in Space::input is raw. A step that folds or stores an operand from there
/// prescales it and says so with leaf_arrived or leaf_held; everything else is scaled already.
/// `finish` postscales the result as it is written; finished data is only stored from then on.
/// Collectives that fold nothing scale nothing: they use none of the three flags.
struct Step {
  int to = kNobody;
  Slice send{};
  int from = kNobody;
  Slice recv{};
  Slice held{};  // empty: recv itself
  Action action = Action::store;
  bool leaf_arrived = false;
  bool leaf_held = false;
  bool finish = false;
};

using Lane = std::vector<Step>;

struct Schedule {
  std::vector<Lane> lanes{};
  size_t scratch = 0;  // elements, over all lanes
};

/// The question a planner answers.
struct Shape {
  int rank = 0;
  int size = 1;
  size_t count = 0;
  std::span<const size_t> counts{};  // uneven forms (counts_of); `count` is then not looked at
  std::span<const int> leaves{};     // logical ranks held by each rank; empty: one each
  int lanes = 1;                     // at most; each takes a share of the data
  int segments = 2;  // pieces of a transfer, for planners that pipeline; others have one
  int root = 0;
  std::span<const int> host_of{};  // each rank's host, by any numbers; empty: all share one
};

/// How far the bits of a result are fixed. none: not at all. same_on_all_ranks: every rank of one
/// run has the same. canonical: the fold tree over [0, size) that splits at the largest power of
/// two below its length, recursively, for every element; it depends on nothing but size. A
/// collective that folds nothing is canonical.
enum class Order : uint8_t { none, same_on_all_ranks, canonical };

inline constexpr std::array<std::string_view, 3> kOrderNames{"none", "same_on_all_ranks",
                                                             "canonical"};
constexpr std::string_view name_of(Order order) { return kOrderNames[static_cast<size_t>(order)]; }

/// The level asked for: fast admits every planner, canonical those that are canonical for the
/// shape.
enum class Determinism : uint8_t { fast, canonical };

inline constexpr std::array<std::string_view, 2> kDeterminismNames{"fast", "canonical"};
constexpr std::string_view name_of(Determinism level) {
  return kDeterminismNames[static_cast<size_t>(level)];
}
constexpr std::optional<Determinism> determinism_named(std::string_view name) {
  for (size_t i = 0; i < kDeterminismNames.size(); ++i)
    if (kDeterminismNames[i] == name) return static_cast<Determinism>(i);
  return std::nullopt;
}

/// Along the longest path through the ranks. `bytes` and `folds` are for elements of one byte:
/// multiply by the element's size. A round is a message that a rank has to wait for: a step that
/// exchanges is one, messages sent one after the other without receiving are one together.
/// `messages` are those that one rank deals with beyond one in each round.
struct Cost {
  double rounds = 0;
  double bytes = 0;
  double folds = 0;
  double messages = 0;
  // With several hosts: between ranks that share one. The others above are then between hosts.
  double inner_rounds = 0;
  double inner_bytes = 0;
};

/// A way to run one collective: a pure function from shape to schedule, and what is known of it.
/// Everything but `rank` must be equal on all ranks; their schedules then fit together.
/// `plan` throws Error(invalid_argument) when the shape makes no sense.
struct Planner {
  std::string_view name;
  Collective collective;
  std::string_view summary;  // one sentence for a reader: who sends what to whom, and whose idea
  bool (*fits)(const Shape&);
  Order (*order)(const Shape&);
  Cost (*cost)(const Shape&);
  Schedule (*plan)(const Shape&);
};

/// All of them, for every collective; the order of the table means nothing.
std::span<const Planner> planners();

}  // namespace farandole
