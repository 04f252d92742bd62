// Whole collectives: every planner, size, count, dtype and place, against a reference that folds on
// one rank. Most run in simulated worlds: one thread turns all ranks in an order drawn from a seed,
// over channels that misbehave, and no rank waits for the others between operations.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "backends/mesh.h"
#include "backends/schedule_backend.h"
#include "check.h"
#include "schedule/slicing.h"
#include "world.h"

using namespace farandole;
using testing::World;

namespace {

using Bytes = std::vector<std::byte>;
// ---- one collective, all ranks ----

/// Planners that need hosts have two here, however data travel.
std::vector<int> alternating_hosts(int size) {
  std::vector<int> host_of;
  for (int r = 0; r < size; ++r) host_of.push_back(r % 2);
  return host_of;
}

bool fits_alternating_hosts(const Planner& planner, int size) {
  const std::vector<int> host_of = alternating_hosts(size);
  return planner.fits({.size = size, .count = 1, .host_of = host_of});
}

struct Question {
  const Planner* planner = nullptr;
  int size = 1;
  size_t count = 0;
  DType dtype = DType::float32;
  bool in_place = false;
  ReduceOp op = ReduceOp::sum;
  double prescale = 1, postscale = 1;
  int root = 0;
  uint64_t seed = 0;
  std::vector<size_t> counts{};  // uneven

  Collective kind() const { return planner->collective; }
  Shape shape(int rank) const {
    Shape shape;
    shape.rank = rank;
    shape.size = size;
    shape.count = count;
    shape.counts = counts;
    shape.root = root;
    return shape;
  }
  size_t input_count(int rank) const { return sizes_of(kind(), shape(rank)).input; }
  bool is_canonical() const { return planner->order(shape(0)) == Order::canonical; }
  std::string text() const {
    return std::string(name_of(planner->collective)) + " by " + std::string(planner->name) +
           ", size " + std::to_string(size) + ", count " + std::to_string(count) + ", " +
           std::string(name_of(dtype)) + (in_place ? ", in place" : ", apart") + ", " +
           std::string(name_of(op)) + ", root " + std::to_string(root) +
           (counts.empty() ? "" : ", uneven");
  }
};

/// Where the canonical order can be told from others: magnitudes apart, so that every rounding
/// shows. Elsewhere small integers, whose sums are exact in any order.
void fill(Bytes& data, const Question& question, std::mt19937_64& random) {
  const size_t element = size_of(question.dtype);
  for (size_t i = 0; i < data.size() / element; ++i) {
    std::byte* at = data.data() + i * element;
    const bool exact = !question.is_canonical();
    const float value = exact ? static_cast<float>(random() % 8)
                              : std::ldexp(static_cast<float>(random() % 2001) - 1000.0F,
                                           static_cast<int>(random() % 24) - 12);
    if (question.dtype == DType::float32) {
      std::memcpy(at, &value, element);
    } else if (question.dtype == DType::bfloat16) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      const auto half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(at, &half, element);
    } else {
      const auto whole =
          static_cast<int32_t>(exact ? value : static_cast<float>(random() % 100000));
      std::memcpy(at, &whole, element);
    }
  }
}

Bytes fold_reference(const std::vector<Bytes>& leaves, size_t begin, size_t end,
                     const Question& question) {
  if (end - begin == 1) return leaves[begin];
  const size_t middle = begin + std::bit_floor(end - begin - 1);
  Bytes lower = fold_reference(leaves, begin, middle, question);
  const Bytes upper = fold_reference(leaves, middle, end, question);
  fold_for(question.dtype, question.op)(lower.data(), lower.data(), upper.data(),
                                        lower.size() / size_of(question.dtype));
  return lower;
}

Bytes reduced(std::vector<Bytes> leaves, const Question& question) {
  const Scales scales =
      scales_for(question.dtype, question.op, question.prescale, question.postscale, question.size);
  const size_t count = leaves.front().size() / size_of(question.dtype);
  for (Bytes& leaf : leaves) scale(leaf.data(), leaf.data(), count, question.dtype, scales.leaf);
  Bytes total = fold_reference(leaves, 0, leaves.size(), question);
  scale(total.data(), total.data(), count, question.dtype, scales.finish);
  return total;
}

Bytes cut(const Bytes& whole, Slice slice, size_t element) {
  const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(slice.offset * element);
  return {begin, begin + static_cast<std::ptrdiff_t>(slice.count * element)};
}

Bytes expected_of(int rank, const std::vector<Bytes>& inputs, const Question& question) {
  const Collective kind = question.kind();
  const Shape shape = question.shape(rank);
  const size_t element = size_of(question.dtype);
  const auto& roots = inputs[static_cast<size_t>(question.root)];
  Bytes joined;
  const auto join = [&](const Bytes& more) {
    joined.insert(joined.end(), more.begin(), more.end());
  };
  switch (kind) {
    case Collective::all_reduce:
      return reduced(inputs, question);
    case Collective::reduce:
      return rank == question.root ? reduced(inputs, question) : joined;
    case Collective::reduce_scatter:
      return cut(reduced(inputs, question), share_of(kind, shape, rank), element);
    case Collective::all_gather:
    case Collective::gather:
      if (kind == Collective::all_gather || rank == question.root)
        for (const Bytes& input : inputs) join(input);
      return joined;
    case Collective::scatter:
      return cut(roots, share_of(kind, shape, rank), element);
    case Collective::all_to_all:
      for (int from = 0; from < question.size; ++from)
        join(cut(inputs[static_cast<size_t>(from)], block_sent(shape, from, rank), element));
      return joined;
    case Collective::broadcast:
      return roots;
    default:
      return joined;
  }
}

/// Where the shorter buffer begins in the longer one, in elements, when a rank is in place.
size_t in_place_at(const Question& question, int rank) {
  switch (question.kind()) {
    case Collective::all_gather:
    case Collective::gather:
    case Collective::reduce_scatter:
    case Collective::scatter:
      return share_of(question.kind(), question.shape(rank), rank).offset;
    default:
      return 0;
  }
}

/// One rank's memory and operation; `check` compares what came out.
class Share {
 public:
  Share(const Question& question, int rank, const std::vector<Bytes>& inputs,
        std::shared_ptr<Arena> arena)
      : input_(inputs[static_cast<size_t>(rank)]),
        expected_(expected_of(rank, inputs, question)),
        arena_(std::move(arena)) {
    const Collective kind = question.kind();
    const size_t element = size_of(question.dtype);
    const size_t longest = std::max(input_.size(), expected_.size());
    // In place the shorter buffer lies inside the longer one; a rank that has one has that alone.
    const bool gathers = kind == Collective::all_gather || kind == Collective::gather;
    const bool both = !input_.empty() && !expected_.empty();
    const size_t at = question.in_place && both ? in_place_at(question, rank) * element : 0;
    const size_t input_at = gathers ? at : 0;
    const size_t output_at = !question.in_place ? longest : gathers ? 0 : at;
    const size_t bytes = 2 * longest + 1;
    if (arena_) {
      memory_ = arena_->allocate(bytes);
    } else {
      heap_.resize(bytes);
      memory_ = heap_.data();
    }
    std::fill_n(memory_, bytes, std::byte{0xa5});
    std::ranges::copy(input_, memory_ + input_at);
    operation.kind = kind;
    operation.count = question.count;
    operation.counts = question.counts;
    operation.input = {memory_ + input_at, input_.size() / element, question.dtype};
    operation.output = {memory_ + output_at, expected_.size() / element, question.dtype};
    operation.op = question.op;
    operation.prescale = question.prescale;
    operation.postscale = question.postscale;
    operation.root = question.root;
    operation.algorithm = question.planner->name;
    operation.level = question.is_canonical() ? Determinism::canonical : Determinism::fast;
    in_place_ = question.in_place;
  }
  ~Share() {
    if (arena_) arena_->release(memory_);
  }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;

  void check() const {
    CHECK(std::equal(expected_.begin(), expected_.end(), operation.output.data));
    if (!in_place_) CHECK(std::equal(input_.begin(), input_.end(), operation.input.data));
  }

  Operation operation;

 private:
  Bytes input_, expected_;
  std::shared_ptr<Arena> arena_;
  Bytes heap_;
  std::byte* memory_ = nullptr;
  bool in_place_ = false;
};

/// All ranks' shares of a list of questions, made when the first rank needs them and dropped after
/// the last.
class Work {
 public:
  Work(std::vector<Question> questions, const World& world, bool in_arena)
      : questions_(std::move(questions)), world_(&world), in_arena_(in_arena) {}

  size_t size() const { return questions_.size(); }
  const Question& question(size_t index) const { return questions_[index]; }

  Share& share(size_t index, int rank) {
    auto& all = shares_[index];
    if (all.empty()) {
      const Question& question = questions_[index];
      std::mt19937_64 random(question.seed);
      std::vector<Bytes> inputs;
      for (int r = 0; r < question.size; ++r)
        fill(inputs.emplace_back(question.input_count(r) * size_of(question.dtype)), question,
             random);
      for (int r = 0; r < question.size; ++r)
        all.push_back(std::make_unique<Share>(question, r, inputs,
                                              in_arena_ && index % 2 ? world_->arena(r) : nullptr));
    }
    return *all[static_cast<size_t>(rank)];
  }

  void finish(size_t index, int rank) {
    auto& all = shares_[index];
    all[static_cast<size_t>(rank)].reset();
    if (std::ranges::none_of(all, [](const auto& left) { return left != nullptr; }))
      shares_.erase(index);
  }

 private:
  std::vector<Question> questions_;
  const World* world_;
  bool in_arena_;
  std::map<size_t, std::vector<std::unique_ptr<Share>>> shares_;
};

// ---- counting what travels ----

struct Tally {
  size_t written = 0, consumed = 0;
};

class TallyChannel : public Channel {
 public:
  TallyChannel(std::unique_ptr<Channel> inner, Tally& tally)
      : inner_(std::move(inner)), tally_(&tally) {}
  size_t write(std::span<const std::byte> bytes) override {
    const size_t taken = inner_->write(bytes);
    tally_->written += taken;
    return taken;
  }
  bool drained() override { return inner_->drained(); }
  bool copies() const override { return inner_->copies(); }
  bool refers() override { return inner_->refers(); }
  PlaceRule place_rule() const override { return inner_->place_rule(); }
  void offer(std::byte* place, size_t count) override { inner_->offer(place, count); }
  std::optional<std::span<std::byte>> place_for(std::span<const std::byte> bytes) override {
    return inner_->place_for(bytes);
  }
  Held let_go() override { return inner_->let_go(); }
  std::span<const std::byte> peek(size_t at_least) override { return inner_->peek(at_least); }
  void consume(size_t count) override {
    tally_->consumed += count;
    inner_->consume(count);
  }

 private:
  std::unique_ptr<Channel> inner_;
  Tally* tally_;
};

class TallyConnecting : public Connecting {
 public:
  TallyConnecting(std::unique_ptr<Connecting> inner, Tally& tally)
      : inner_(std::move(inner)), tally_(&tally) {}
  std::vector<std::unique_ptr<Channel>> poll(TimePoint now) override {
    auto channels = inner_->poll(now);
    for (auto& channel : channels)
      channel = std::make_unique<TallyChannel>(std::move(channel), *tally_);
    return channels;
  }

 private:
  std::unique_ptr<Connecting> inner_;
  Tally* tally_;
};

/// A backend for each rank of a world, on one transport, for one stream of operations.
struct Backends {
  Backends(const World& world, const TransportRow& row, const ChaosPlan* chaos,
           uint64_t stream_key = 1) {
    tallies.resize(static_cast<size_t>(world.size()));
    for (int rank = 0; rank < world.size(); ++rank) {
      transports.push_back(world.transport(row, rank, chaos));
      auto connect = connect_members({transports.back()}, world.members(), stream_key);
      auto counted = [connect, tally = &tallies[static_cast<size_t>(rank)]](int peer, int lanes) {
        return std::make_unique<TallyConnecting>(connect(peer, lanes), *tally);
      };
      const bool shared = row.name == "shm";
      all.push_back(std::make_unique<ScheduleBackend>(
          ScheduleGroup{rank, world.size(), alternating_hosts(world.size())}, counted,
          shared ? world.arena(rank) : nullptr));
    }
  }

  // An engine's transports outlive its groups, and so they do here.
  std::vector<std::shared_ptr<Transport>> transports;
  std::vector<Tally> tallies;
  std::vector<std::unique_ptr<ScheduleBackend>> all;
};

// ---- simulated worlds ----

std::vector<int> simulated_sizes() {
  if (testing::kThreadSanitizer) return {3};
  if (testing::kSanitizer) return {2, 3, 5};
  return {1, 2, 3, 5, 8};  // that schedules are right for all sizes is proved by their checker
}

/// Chaos is for many runs: each sees a small world and one more.
std::vector<int> chaotic_sizes(uint64_t seed) {
  if (testing::kSanitizer) return simulated_sizes();
  return {3, static_cast<int>(4 + seed % 5)};
}

/// Runs all the work on all ranks, turned by one thread in an order drawn from `seed`.
void simulate(Work& work, Backends& backends, uint64_t seed) {
  constexpr int kTurnsWithoutAMove = 100'000;
  constexpr auto kPatience = std::chrono::seconds(5);
  const size_t size = backends.all.size();
  std::mt19937_64 random(seed);
  std::vector<size_t> at(size, 0);
  std::vector<bool> started(size, false);
  int idle = 0;
  TimePoint moved = now();  // the kernel may take a while, where others want the processor
  for (size_t ranks_left = size; ranks_left > 0;) {
    const size_t rank = random() % size;
    if (at[rank] == work.size()) continue;
    ScheduleBackend& backend = *backends.all[rank];
    Share& share = work.share(at[rank], static_cast<int>(rank));
    const testing::Note note(work.question(at[rank]).text(), ", rank ", rank, ", operation ",
                             at[rank]);
    if (!started[rank]) {
      CHECK(backend.can_run(share.operation));
      backend.start(share.operation, static_cast<uint32_t>(at[rank]));
      started[rank] = true;
    }
    const Progress progress = backend.poll(TimePoint::min());  // one piece
    if (progress != Progress::idle) moved = now();
    idle = progress == Progress::idle ? idle + 1 : 0;
    if (idle > kTurnsWithoutAMove && now() - moved > kPatience) {
      testing::fail(__FILE__, __LINE__, "no rank moves");
      return;
    }
    if (progress != Progress::finished) continue;
    share.check();
    work.finish(at[rank], static_cast<int>(rank));
    started[rank] = false;
    if (++at[rank] == work.size()) --ranks_left;
  }
  Tally sum;
  for (const Tally& tally : backends.tallies) {
    sum.written += tally.written;
    sum.consumed += tally.consumed;
  }
  CHECK_EQUAL(sum.consumed, sum.written);  // the channels are empty
}

struct Scaling {
  ReduceOp op;
  double prescale, postscale;
};
constexpr Scaling kExact[] = {{ReduceOp::sum, 1, 1},
                              {ReduceOp::mean, 1, 1},
                              {ReduceOp::max, 1, 1},
                              {ReduceOp::sum, 2, 0.5},
                              {ReduceOp::min, 1, 1}};

/// Shares that differ, some of them empty; one large where there is one for each rank.
std::vector<size_t> draw_counts(size_t number, bool large, std::mt19937_64& random) {
  std::vector<size_t> counts;
  for (size_t i = 0; i < number; ++i) counts.push_back(random() % 3 == 0 ? 0 : random() % 200);
  if (large) counts[random() % number] = 50'000;
  return counts;
}

/// Every planner × count × dtype × place for one size; the largest count once per planner.
std::vector<Question> questions_for(int size, uint64_t seed) {
  std::vector<Question> questions;
  std::mt19937_64 random(seed);
  const auto ask = [&](Question question) {
    const size_t turn = questions.size();
    question.size = size;
    question.seed = seed + turn;
    question.root = static_cast<int>(turn % static_cast<size_t>(size));
    if (folds(question.kind())) {
      const Scaling& scaling = kExact[turn % std::size(kExact)];
      question.op = scaling.op;
      question.prescale = scaling.prescale;
      question.postscale = scaling.postscale;
    }
    questions.push_back(std::move(question));
  };
  constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::int32};
  for (const Planner& planner : planners()) {
    if (!fits_alternating_hosts(planner, size)) continue;
    const Collective kind = planner.collective;
    if (kind == Collective::barrier) {
      ask({.planner = &planner, .dtype = DType::uint8});
      continue;
    }
    const auto dtype = [&] { return kTypes[questions.size() % 3]; };
    const auto in_place = [&] { return goes_in_place(kind) && questions.size() % 2 == 0; };
    for (const size_t count : {0, 1, 2, 7, 1000})
      for (const DType each : kTypes)
        for (const bool shared : {false, true})
          if (!shared || goes_in_place(kind))
            ask({.planner = &planner, .count = count, .dtype = each, .in_place = shared});
    const size_t large =
        kind == Collective::all_to_all ? 100'003 / static_cast<size_t>(size) : 100'003;
    ask({.planner = &planner, .count = large, .dtype = dtype(), .in_place = in_place()});
    const size_t uneven = counts_of(kind, size);
    for (int draw = 0; draw < 4 && uneven > 0; ++draw) {
      Question question{.planner = &planner, .dtype = dtype(), .in_place = in_place()};
      question.counts = draw_counts(uneven, draw == 3, random);
      question.size = size;
      if (planner.fits(question.shape(0))) ask(std::move(question));
    }
  }
  return questions;
}

void simulate_size(int size, const TransportRow& row, uint64_t seed, bool chaotic) {
  const testing::Note note("transport ", row.name, ", size ", size, ", seed ", seed,
                           chaotic ? ", chaos" : "");
  const World world(size, 16 * 1024);
  const ChaosPlan chaos{.seed = seed, .longest_write = 40'000, .longest_read = 40'000};
  Backends backends(world, row, chaotic ? &chaos : nullptr);
  std::vector<Question> questions = questions_for(size, seed);
  std::shuffle(questions.begin(), questions.end(), std::mt19937_64(seed));
  if (testing::kSanitizer) questions.resize(questions.size() / 3);
  Work work(std::move(questions), world, row.name == "shm");
  simulate(work, backends, seed);
}

/// A question of a few hundred thousand elements takes several lanes and segments.
Question big_question(int size, std::string_view planner, DType dtype) {
  return {.planner = find_planner(Collective::all_reduce, planner),
          .size = size,
          .count = testing::kSanitizer ? 150'001 : 400'009,
          .dtype = dtype,
          .seed = 11};
}

}  // namespace

TEST(simulated_worlds_compute_every_collective) {
  for (const int size : simulated_sizes())
    for (const TransportRow& row : transports())
      simulate_size(size, row, static_cast<uint64_t>(size) * 100, false);
}

TEST(simulated_worlds_survive_chaos) {
  const uint64_t seed = std::random_device{}();
  std::cout << "  seed " << seed << std::endl;
  for (const int size : chaotic_sizes(seed))
    for (const TransportRow& row : transports())
      simulate_size(size, row, seed + static_cast<uint64_t>(size), true);
}

TEST(simulated_worlds_pipeline_lanes_and_segments) {
  for (const TransportRow& row : transports())
    for (const int size : {3, row.name == "shm" ? 5 : 2}) {
      if (testing::kSanitizer && size != 3) continue;
      const testing::Note note("transport ", row.name, ", size ", size);
      const World world(size);
      const ChaosPlan chaos{.seed = 3, .longest_write = 100'000, .longest_read = 100'000};
      Backends backends(world, row, &chaos);
      std::vector<Question> questions;
      for (const Planner& planner : planners())
        if (planner.collective == Collective::all_reduce && fits_alternating_hosts(planner, size))
          for (const DType dtype : {DType::float32, DType::float32})  // heap, then arena
            questions.push_back(big_question(size, planner.name, dtype));
      Work work(questions, world, row.name == "shm");
      simulate(work, backends, 77);
    }
}

TEST(ring_of_three_is_told_from_the_canonical_order) {
  // The control of the bit-for-bit comparisons above: data on which the order shows.
  Question canonical = big_question(3, "direct", DType::float32);
  canonical.count = 1000;
  std::mt19937_64 random(1);
  std::vector<Bytes> inputs(3, Bytes(canonical.count * size_of(canonical.dtype)));
  for (Bytes& input : inputs) fill(input, canonical, random);
  const Bytes folded = reduced(inputs, canonical);
  std::rotate(inputs.begin(), inputs.begin() + 1, inputs.end());
  CHECK(reduced(inputs, canonical) != folded);
}

TEST(threads_as_ranks_compute_every_collective) {
  constexpr size_t kEvery = testing::kThreadSanitizer ? 11 : 3;
  for (const TransportRow& row : transports())
    for (const int size : {2, 3, 4}) {
      const testing::Note note("transport ", row.name, ", size ", size);
      const World world(size);
      Backends backends(world, row, nullptr);
      testing::run_ranks(size, [&](int rank) {
        // Every rank makes all shares and runs its own: nothing is shared but the channels.
        Work work(questions_for(size, 4), world, false);
        ScheduleBackend& backend = *backends.all[static_cast<size_t>(rank)];
        for (size_t i = 0; i < work.size(); i += kEvery) {
          const testing::Note which(work.question(i).text(), ", rank ", rank);
          Share& share = work.share(i, rank);
          backend.start(share.operation, static_cast<uint32_t>(i));
          for (;;) {
            const Progress progress = backend.poll(now() + std::chrono::microseconds(50));
            if (progress == Progress::finished) break;
            if (progress == Progress::idle) std::this_thread::yield();
          }
          share.check();
          for (int r = 0; r < size; ++r) work.finish(i, r);
        }
      });
    }
}

TEST(threads_pass_references_into_their_arenas) {
  constexpr int ranks = 2;
  const TransportRow& shm = *std::ranges::find(transports(), "shm", &TransportRow::name);
  const World world(ranks);
  Backends backends(world, shm, nullptr);
  testing::run_ranks(ranks, [&](int rank) {
    std::mt19937_64 random(5);
    const Question question = big_question(ranks, "halving_doubling", DType::float32);
    std::vector<Bytes> inputs(ranks, Bytes(question.count * size_of(question.dtype)));
    for (Bytes& input : inputs) fill(input, question, random);
    for (uint32_t i = 0; i < 5; ++i) {
      const Share share(question, rank, inputs, world.arena(rank));
      ScheduleBackend& backend = *backends.all[static_cast<size_t>(rank)];
      backend.start(share.operation, i);
      while (backend.poll(now() + std::chrono::microseconds(50)) != Progress::finished)
        std::this_thread::yield();
      share.check();
    }
  });
}

TEST(backend_chooses_when_nobody_insists_and_refuses_what_the_level_forbids) {
  const World world(3);
  Backends backends(world, transports()[0], nullptr);
  ScheduleBackend& backend = *backends.all[0];
  std::vector<float> data(8);
  Operation operation;
  operation.kind = Collective::all_reduce;
  operation.input =
      operation.output = {reinterpret_cast<std::byte*>(data.data()), 8, DType::float32};
  operation.count = 8;
  CHECK(backend.can_run(operation));
  operation.algorithm = "ring";
  CHECK(!backend.can_run(operation));
  CHECK_THROWS(backend.refuse(operation), Error, e.code() == ErrorCode::invalid_argument);
  operation.level = Determinism::fast;
  CHECK(backend.can_run(operation));
  operation.level = Determinism::canonical;
  operation.algorithm = "carrier pigeon";
  CHECK(!backend.can_run(operation));
  operation.algorithm = backend.name();
  CHECK(backend.can_run(operation));
  operation.input.dtype = DType::boolean;
  operation.op = ReduceOp::mean;
  CHECK(!backend.can_run(operation));
  operation.kind = Collective::all_to_all;
  CHECK(backend.can_run(operation));
  operation.kind = Collective::send;
  CHECK(backend.can_run(operation));  // where no path runs it
}

TEST(backend_refuses_counts_that_make_no_sense_and_keeps_plans_of_different_ones_apart) {
  const World world(3);
  Backends backends(world, transports()[0], nullptr);
  std::vector<float> data(64);
  Operation operation;
  operation.kind = Collective::all_gather;
  operation.input =
      operation.output = {reinterpret_cast<std::byte*>(data.data()), 64, DType::float32};
  operation.counts = {1, 2};
  CHECK_THROWS(backends.all[0]->start(operation, 0), Error,
               e.verdict().find("takes 3 counts") != std::string::npos);
  operation.kind = Collective::broadcast;
  CHECK_THROWS(backends.all[0]->start(operation, 0), Error,
               e.verdict().find("no uneven form") != std::string::npos);
  const Planner* planner = find_planner(Collective::all_gather, "ring");
  std::vector<Question> questions;
  for (const size_t last : {3, 0, 5, 3})
    questions.push_back({.planner = planner, .size = 3, .seed = last, .counts = {1, 2, last}});
  Work work(questions, world, false);
  simulate(work, backends, 1);
}

TEST(backend_waits_for_a_peer_without_blocking) {
  const World world(2);
  Backends backends(world, *std::ranges::find(transports(), "shm", &TransportRow::name), nullptr);
  Work work({big_question(2, "direct", DType::float32)}, world, false);
  backends.all[0]->start(work.share(0, 0).operation, 0);
  for (int i = 0; i < 10; ++i)
    CHECK(backends.all[0]->poll(TimePoint::max()) == Progress::idle);  // rank 1 is not there
  backends.all[1]->start(work.share(0, 1).operation, 0);
  CHECK(backends.all[1]->poll(TimePoint::max()) != Progress::idle);
  CHECK(backends.all[0]->poll(TimePoint::max()) != Progress::idle);
}

TEST(backend_names_operation_lane_step_and_peer_when_a_channel_breaks) {
  const World world(2);
  const ChaosPlan chaos{.seed = 1, .cut_at = 5000};
  Backends backends(world, transports()[0], &chaos);
  Work work({big_question(2, "direct", DType::float32)}, world, false);
  for (int rank : {0, 1}) {
    work.share(0, rank).operation.name = "bucket 3";
    backends.all[static_cast<size_t>(rank)]->start(work.share(0, rank).operation, 41);
  }
  bool broken = false;
  for (int i = 0; i < 1'000'000 && !broken; ++i) {
    try {
      backends.all[static_cast<size_t>(i % 2)]->poll(TimePoint::min());
    } catch (const Error& error) {
      broken = true;
      CHECK(error.code() == ErrorCode::link);
      CHECK_EQUAL(error.where().peer, 1 - i % 2);
      CHECK_EQUAL(error.where().operation, "all_reduce");
      CHECK_EQUAL(error.where().tensor, "bucket 3");
      CHECK_EQUAL(error.where().sequence, 41U);
      CHECK(error.where().lane >= 0 && error.where().step >= 0);
      CHECK(error.where().evidence.find("stopped at step") != std::string::npos);
    }
  }
  CHECK(broken);
  // After abort() the caller's memory is nobody's business but the caller's, and nothing runs.
  for (auto& backend : backends.all) backend->abort();
  const Deadline until = Deadline::after(std::chrono::seconds(5));
  while (backends.all[0]->let_go() == Held::for_now || backends.all[1]->let_go() == Held::for_now)
    CHECK(!until.passed(now()));
  work.finish(0, 0);
  work.finish(0, 1);
  CHECK(backends.all[0]->poll(TimePoint::max()) == Progress::idle);
  Operation barrier;
  CHECK_THROWS(backends.all[0]->start(barrier, 42), Error, e.code() == ErrorCode::aborted);
}

TEST(mesh_says_whom_no_transport_reaches) {
  const World world(2);
  std::vector<PeerInfo> members = world.members();
  members[1].host = "there";
  const TransportRow& shm = *std::ranges::find(transports(), "shm", &TransportRow::name);
  const Connect connect = connect_members({world.transport(shm, 0, nullptr)}, members, 1);
  CHECK_THROWS(connect(1, 1), Error, e.code() == ErrorCode::link && e.where().peer == 1);
}

TEST(nothing_is_left_in_the_arenas_when_backends_are_gone) {
  const World world(3);
  const TransportRow& shm = *std::ranges::find(transports(), "shm", &TransportRow::name);
  for (uint64_t round = 0; round < (testing::kSanitizer ? 1 : 3); ++round) {
    Backends backends(world, shm, nullptr, round);
    Work work(questions_for(3, round), world, true);
    simulate(work, backends, round);
  }
  for (int rank = 0; rank < world.size(); ++rank)
    CHECK_EQUAL(world.arena(rank)->bytes_in_use(), 0U);
}
