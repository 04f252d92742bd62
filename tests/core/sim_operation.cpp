#include "core/sim_operation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backends/paths.h"
#include "fold/cast.h"
#include "fold/fold.h"
#include "schedule/planners.h"
#include "schedule/routes.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

using Bytes = std::vector<std::byte>;

template <typename T>
const T& pick(SimRandom& random, const std::vector<T>& from) {
  return from[random() % from.size()];
}

bool one_in(SimRandom& random, uint64_t n) { return random() % n == 0; }

// ---- the question ----

size_t draw_count(SimRandom& random, int size) {
  switch (random() % 8) {
    case 0:
      return random() % 3;
    case 1:
      return static_cast<size_t>(size) - 1 + random() % 3;
    case 2:
    case 3:
      return 1 + random() % 300;  // about where lines end
    case 4:
      return 4000 + random() % 9000;  // about where one_shot ends
    case 5:
      return 40'000 + random() % 60'000;
    default:
      return 1 + random() % 40;
  }
}

/// Shares that differ, about as large together as even ones.
void draw_counts(SimRandom& random, int size, Operation& o) {
  const size_t each = o.count / (o.kind == Collective::all_to_all ? static_cast<size_t>(size) : 1);
  for (size_t i = 0; i < counts_of(o.kind, size); ++i)
    o.counts.push_back(one_in(random, 4) ? 0 : random() % (2 * each + 1));
}

Operation draw_question(SimRandom& random, int size) {
  static const std::vector<Collective> kinds = {Collective::all_reduce,     Collective::all_reduce,
                                                Collective::reduce_scatter, Collective::all_gather,
                                                Collective::broadcast,      Collective::barrier,
                                                Collective::reduce,         Collective::gather,
                                                Collective::scatter,        Collective::all_to_all};
  static const std::vector<DType> dtypes = {DType::float32, DType::float32, DType::bfloat16,
                                            DType::float64, DType::int32,   DType::uint8};
  static const std::vector<ReduceOp> ops = {ReduceOp::sum, ReduceOp::sum, ReduceOp::mean,
                                            ReduceOp::min, ReduceOp::max};
  Operation o;
  o.kind = pick(random, kinds);
  o.input.dtype = o.output.dtype = pick(random, dtypes);
  if (o.kind != Collective::barrier) o.count = draw_count(random, size);
  if (one_in(random, 3)) draw_counts(random, size, o);
  if (folds(o.kind)) o.op = pick(random, ops);
  if (is_rooted(o.kind)) o.root = static_cast<int>(random() % static_cast<uint64_t>(size));
  if (one_in(random, 3)) o.name = "tensor " + std::to_string(random() % 100);
  return o;
}

/// Draws a path or planner that can run the operation, which sets the level.
void draw_algorithm(SimRandom& random, const std::vector<int>& host_of, int size, Operation& o) {
  if (o.kind == Collective::barrier || one_in(random, 3)) return;
  Shape shape = shape_of(o, 0, size);
  shape.host_of = host_of;
  const size_t bytes = longest_input(o.kind, shape) * size_of(o.input.dtype);
  std::vector<std::string> able = {"schedule"};
  for (const PathRow* path : path_table())
    if (fits(*path, o.kind, bytes)) able.emplace_back(path->name);
  for (const Planner& planner : planners())
    if (planner.collective == o.kind && is_allowed(planner, shape, Determinism::fast))
      able.emplace_back(planner.name);
  o.algorithm = pick(random, able);
  const Planner* planner = find_planner(o.kind, o.algorithm);
  if (planner != nullptr && !is_allowed(*planner, shape, Determinism::canonical))
    o.level = Determinism::fast;
}

/// Level `fast` gets small integers, whose sums are exact in any order. Other levels get values of
/// very different magnitude, so that every rounding shows.
Bytes draw_data(SimRandom& random, const Operation& o, size_t count) {
  const DTypeRow& type = row(o.input.dtype);
  const bool whole = type.kind == DTypeKind::integer;
  Bytes data(count * type.bytes);
  for (size_t i = 0; i < count; ++i) {
    const auto small = static_cast<uint32_t>(random() % 8);
    const bool wide = !whole && o.level == Determinism::canonical;
    const float value = wide ? std::ldexp(static_cast<float>(random() % 2001) - 1000.0F,
                                          static_cast<int>(random() % 24) - 12)
                             : static_cast<float>(small);
    std::byte* to = data.data() + i * type.bytes;
    if (whole)
      std::memcpy(to, &small, type.bytes);  // little-endian: its lowest bytes
    else
      cast(to, o.input.dtype, reinterpret_cast<const std::byte*>(&value), DType::float32, 1);
  }
  return data;
}

// ---- the reference ----

/// docs/determinism.md, word for word: the tree splits at the largest power of two below the size.
Bytes fold_tree(const std::vector<Bytes>& leaves, size_t begin, size_t end, const Operation& o) {
  if (end - begin == 1) return leaves[begin];
  const size_t middle = begin + std::bit_floor(end - begin - 1);
  Bytes lower = fold_tree(leaves, begin, middle, o);
  const Bytes upper = fold_tree(leaves, middle, end, o);
  fold_for(o.input.dtype, o.op)(lower.data(), lower.data(), upper.data(),
                                lower.size() / size_of(o.input.dtype));
  return lower;
}

Bytes reduced(std::vector<Bytes> leaves, const Operation& o) {
  const Scales scales =
      scales_for(o.input.dtype, o.op, o.prescale, o.postscale, static_cast<int>(leaves.size()));
  const size_t count = leaves.front().size() / size_of(o.input.dtype);
  for (Bytes& leaf : leaves) scale(leaf.data(), leaf.data(), count, o.input.dtype, scales.leaf);
  Bytes total = fold_tree(leaves, 0, leaves.size(), o);
  scale(total.data(), total.data(), count, o.input.dtype, scales.finish);
  return total;
}

Bytes cut(const Bytes& whole, Slice slice, size_t element) {
  const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(slice.offset * element);
  return {begin, begin + static_cast<std::ptrdiff_t>(slice.count * element)};
}

/// The output that one rank must have. `total` is the fold over all ranks' inputs, if there is one.
Bytes reference(int rank, const std::vector<Bytes>& inputs, const Bytes& total,
                const Operation& o) {
  const int size = static_cast<int>(inputs.size());
  const Shape shape = shape_of(o, rank, size);
  const size_t element = size_of(o.input.dtype);
  const Bytes& given = inputs[static_cast<size_t>(o.root)];
  Bytes joined;
  const auto join = [&](const Bytes& more) {
    joined.insert(joined.end(), more.begin(), more.end());
  };
  switch (o.kind) {
    case Collective::all_reduce:
      return total;
    case Collective::reduce:
      return rank == o.root ? total : joined;
    case Collective::reduce_scatter:
      return cut(total, share_of(o.kind, shape, rank), element);
    case Collective::broadcast:
      return given;
    case Collective::scatter:
      return cut(given, share_of(o.kind, shape, rank), element);
    case Collective::all_gather:
    case Collective::gather:
      if (o.kind == Collective::all_gather || rank == o.root)
        for (const Bytes& input : inputs) join(input);
      return joined;
    case Collective::all_to_all:
      for (int from = 0; from < size; ++from)
        join(cut(inputs[static_cast<size_t>(from)], block_sent(shape, from, rank), element));
      return joined;
    default:
      return joined;
  }
}

std::vector<Bytes> references(const std::vector<Bytes>& inputs, const Operation& o) {
  const Bytes total = folds(o.kind) ? reduced(inputs, o) : Bytes{};
  std::vector<Bytes> expected;
  for (int r = 0; r < static_cast<int>(inputs.size()); ++r)
    expected.push_back(reference(r, inputs, total, o));
  return expected;
}

// ---- disagreement ----

/// Makes one rank ask for another operation. Its buffers stay large enough for both.
void make_odd(SimRandom& random, Operation& o) {
  switch (random() % 4) {
    case 0:
      o.name += '?';
      return;
    case 1:
      o.prescale = 0.5;
      return;
    case 2:
      o.op = o.op == ReduceOp::max ? ReduceOp::min : ReduceOp::max;
      return;
    default:
      if (o.input.count > 0 && o.kind == Collective::all_reduce)
        o.count = o.output.count = --o.input.count;
      else
        o.name += '!';
  }
}

constexpr size_t kApart = ~size_t{0};

/// Offset in bytes of output in input, or of input in output, when they share memory.
size_t in_place_at(const Operation& o, int size, int rank) {
  switch (o.kind) {
    case Collective::all_gather:
    case Collective::gather:
    case Collective::reduce_scatter:
    case Collective::scatter:
      return share_of(o.kind, shape_of(o, rank, size), rank).offset * size_of(o.input.dtype);
    default:
      return 0;
  }
}

}  // namespace

// ---- shares ----

SimShare::SimShare(const Operation& what, Bytes input, Bytes expected, size_t in_place_at,
                   std::shared_ptr<Arena> arena)
    : operation_(what), expected_(std::move(expected)), arena_(std::move(arena)) {
  const size_t longest = std::max(input.size(), expected_.size());
  const bool apart = in_place_at == kApart;
  const size_t bytes = (apart ? 2 : 1) * longest + 1;
  if (arena_) {
    memory_ = arena_->allocate(bytes);
  } else {
    heap_.resize(bytes);
    memory_ = heap_.data();
  }
  std::fill_n(memory_, bytes, std::byte{0xa5});
  const bool gathers =
      operation_.kind == Collective::all_gather || operation_.kind == Collective::gather;
  std::byte* in = memory_ + (!apart && gathers ? in_place_at : 0);
  std::byte* out = memory_ + (apart ? longest : gathers ? 0 : in_place_at);
  std::ranges::copy(input, in);
  operation_.input.data = in;
  operation_.output = {out, expected_.size() / size_of(operation_.input.dtype),
                       operation_.input.dtype};
}

SimShare::~SimShare() {
  if (arena_) arena_->release(memory_);
}

bool SimShare::is_right() const {
  return std::equal(expected_.begin(), expected_.end(), operation_.output.data);
}

SimOperation draw_operation(SimRandom& random, const std::vector<std::shared_ptr<Arena>>& arenas,
                            const std::vector<int>& host_of) {
  const int size = static_cast<int>(arenas.size());
  Operation what = draw_question(random, size);
  draw_algorithm(random, host_of, size, what);
  if (folds(what.kind) && what.level == Determinism::canonical && one_in(random, 4)) {
    what.prescale = 0.75;
    what.postscale = 3;
  }
  std::vector<Bytes> inputs;
  for (int r = 0; r < size; ++r)
    inputs.push_back(draw_data(random, what, sizes_of(what.kind, shape_of(what, r, size)).input));
  std::vector<Bytes> expected = references(inputs, what);

  SimOperation drawn;
  const uint64_t places = random();  // one bit per rank: is its memory in its arena?
  const bool mixed = one_in(random, 2);
  const bool in_place = goes_in_place(what.kind) && one_in(random, 2);
  const bool disagree = size > 1 && one_in(random, 12);
  const int odd = disagree ? static_cast<int>(random() % static_cast<uint64_t>(size)) : -1;
  bool all_is_mapped = true;
  for (int r = 0; r < size; ++r) {
    const auto i = static_cast<size_t>(r);
    const bool shared = (places >> (mixed ? r : 0) & 1) != 0;
    const bool seen = !expected[i].empty() || (folds(what.kind) && !inputs[i].empty());
    all_is_mapped = all_is_mapped && (shared || !seen);
    Operation mine = what;
    const bool both = !inputs[i].empty() && !expected[i].empty();
    const size_t at = !in_place ? kApart : both ? in_place_at(what, size, r) : 0;
    mine.input.count = inputs[i].size() / size_of(what.input.dtype);
    if (r == odd) make_odd(random, mine);
    drawn.shares.push_back(std::make_shared<SimShare>(
        mine, std::move(inputs[i]), std::move(expected[i]), at, shared ? arenas[i] : nullptr));
  }
  if (disagree)
    drawn.end = SimEnd::mismatch;
  else if (what.algorithm == "mapped" && !all_is_mapped)
    drawn.end = SimEnd::not_shared;
  drawn.text = std::string(name_of(what.kind)) + " of " + std::to_string(what.count) +
               (what.counts.empty() ? " " : " (uneven) ") + std::string(name_of(what.input.dtype)) +
               ", " + std::string(name_of(what.op)) + ", by '" + what.algorithm + "', " +
               (in_place ? "in place" : "apart") +
               (disagree ? ", odd rank " + std::to_string(odd) : "");
  return drawn;
}

}  // namespace farandole
