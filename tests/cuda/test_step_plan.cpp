// How collectives are cut into pieces that fit a bucket, run here piece by piece on plain memory.
#include <cstring>
#include <vector>

#include "check.h"
#include "devices/device_paths.h"
#include "devices/nccl_plan.h"
#include "devices/step_plan.h"
#include "schedule/slicing.h"

using namespace farandole;
using testing::Note;

namespace {

using Words = std::vector<uint32_t>;
constexpr size_t kWord = sizeof(uint32_t);

struct Rank {
  Words input, output;
  std::vector<std::byte> bucket;
};

/// Any words, no two alike.
uint32_t word(int rank, size_t index) {
  return static_cast<uint32_t>(rank + 1) * 100003 + static_cast<uint32_t>(index) * 7;
}

class Machine {
 public:
  Machine(Collective kind, int size, size_t count, const std::vector<size_t>& counts,
          size_t piece_bytes)
      : kind_(kind), ranks_(static_cast<size_t>(size)) {
    for (int r = 0; r < size; ++r) {
      StepShape step{.kind = kind, .element = kWord, .piece_bytes = piece_bytes};
      step.shape = {.rank = r, .size = size, .count = count, .counts = counts, .root = size - 1};
      steps_.push_back(step);
      const Sizes sizes = sizes_of(kind, step.shape);
      Rank& rank = ranks_[static_cast<size_t>(r)];
      for (size_t i = 0; i < sizes.input; ++i) rank.input.push_back(word(r, i));
      rank.output.assign(sizes.output, 0xdead);
      rank.bucket.resize(piece_bytes);
    }
  }

  void run() {
    for (size_t p = 0; p < pieces_of(steps_[0]); ++p) {
      std::vector<StepPiece> pieces;
      for (const StepShape& step : steps_) {
        CHECK_EQUAL(pieces_of(step), pieces_of(steps_[0]));
        pieces.push_back(piece_of(step, p));
      }
      for (size_t r = 0; r < ranks_.size(); ++r)
        for (const CudaMove& move : pieces[r].in)
          copy(ranks_[r].bucket, move.to, ranks_[r].input, move.from, move.bytes);
      for (size_t r = 0; r < ranks_.size(); ++r) fold(ranks_[r], pieces[r]);
      for (size_t r = 0; r < ranks_.size(); ++r)
        for (const CudaMove& move : pieces[r].out)
          copy(ranks_[r].output, move.to, ranks_[static_cast<size_t>(move.rank)].bucket, move.from,
               move.bytes);
    }
  }

  void check() const {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const Note note("rank ", r);
      CHECK(ranks_[r].output == expected(static_cast<int>(r)));
    }
  }

 private:
  template <typename T>
  static size_t bytes_of(const std::vector<T>& memory) {
    return memory.size() * sizeof(T);
  }
  template <typename To, typename From>
  static void copy(std::vector<To>& to, size_t at, const std::vector<From>& from, size_t begin,
                   size_t bytes) {
    CHECK(at + bytes <= bytes_of(to));
    CHECK(begin + bytes <= bytes_of(from));
    if (at + bytes > bytes_of(to) || begin + bytes > bytes_of(from)) return;
    std::memcpy(reinterpret_cast<std::byte*>(to.data()) + at,
                reinterpret_cast<const std::byte*>(from.data()) + begin, bytes);
  }

  void fold(Rank& me, const StepPiece& piece) {
    for (size_t i = piece.first; i < piece.first + piece.count; ++i) {
      uint32_t sum = 0;
      for (const Rank& rank : ranks_) {
        uint32_t one = 0;
        CHECK((i + 1) * kWord <= rank.bucket.size());
        std::memcpy(&one, rank.bucket.data() + i * kWord, kWord);
        sum += one;
      }
      const auto store = [&](Rank& to) { std::memcpy(&to.bucket.at(i * kWord), &sum, kWord); };
      if (piece.folds_to == kFoldsToAllBuckets)
        for (Rank& rank : ranks_) store(rank);
      else if (piece.folds_to == kFoldsToOutput)
        me.output.at(piece.fold_to / kWord + i - piece.first) = sum;
      else
        store(ranks_.at(static_cast<size_t>(piece.folds_to)));
    }
  }

  uint32_t sum(size_t index) const {
    uint32_t all = 0;
    for (const Rank& rank : ranks_) all += rank.input[index];
    return all;
  }

  Words expected(int me) const {
    const Shape& shape = steps_[static_cast<size_t>(me)].shape;
    Words out(ranks_[static_cast<size_t>(me)].output.size());
    for (size_t i = 0; i < out.size(); ++i) {
      if (kind_ == Collective::all_reduce || kind_ == Collective::reduce) out[i] = sum(i);
      if (kind_ == Collective::reduce_scatter) out[i] = sum(share_of(kind_, shape, me).offset + i);
      if (kind_ == Collective::broadcast) out[i] = word(shape.root, i);
      if (kind_ == Collective::scatter)
        out[i] = word(shape.root, share_of(kind_, shape, me).offset + i);
    }
    const bool gathers = kind_ == Collective::all_gather || kind_ == Collective::gather;
    for (int r = 0; r < shape.size && !out.empty(); ++r) {
      if (!gathers && kind_ != Collective::all_to_all) break;
      const Slice to = gathers ? share_of(kind_, shape, r) : block_received(shape, r, me);
      const size_t from = gathers ? 0 : block_sent(shape, r, me).offset;
      for (size_t i = 0; i < to.count; ++i) out[to.offset + i] = word(r, from + i);
    }
    return out;
  }

  Collective kind_;
  std::vector<StepShape> steps_;
  std::vector<Rank> ranks_;
};

}  // namespace

TEST(steps_of_every_collective_cut_into_pieces) {
  for (const Collective kind :
       {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
        Collective::broadcast, Collective::all_to_all, Collective::reduce, Collective::gather,
        Collective::scatter})
    for (const int size : {1, 2, 3, 5})
      for (const size_t count : {size_t{1}, size_t{7}, size_t{1003}})
        for (const size_t piece_bytes : {size_t{64} * 5, size_t{4096}})
          for (const bool uneven : {false, true}) {
            std::vector<size_t> counts(uneven ? counts_of(kind, size) : 0);
            for (size_t i = 0; i < counts.size(); ++i) counts[i] = i * 31 % 5 * count / 2;
            if (uneven && counts.empty()) continue;
            const Note note(name_of(kind), " of ", count, " on ", size, " ranks, ", piece_bytes,
                            " bytes", uneven ? ", uneven" : "");
            size_t whole = count;  // the shape's, of a reduce_scatter
            if (uneven && kind == Collective::reduce_scatter) {
              whole = 0;
              for (const size_t n : counts) whole += n;
            }
            Machine machine(kind, size, whole, counts, piece_bytes);
            machine.run();
            machine.check();
          }
}

TEST(arrays_that_lie_apart_are_cut_where_pieces_end) {
  Stretches input, output;
  for (const uint64_t i : {uint64_t{0}, uint64_t{1}, uint64_t{2}}) {
    input.add(1000 * (i + 1), 40 * i);  // the first is empty
    output.add(9000 + 1000 * i, 40);
  }
  StepPiece piece;
  piece.in = {{30, 8, 60, 1}};   // of the first 40 bytes the last 10, then 50 of 80
  piece.out = {{5, 70, 50, 0}};  // 10 of the second, the third whole
  lie_apart(piece, input, output);
  CHECK_EQUAL(piece.in.size(), size_t{2});
  CHECK_EQUAL(piece.in[0].from, uint64_t{2030});
  CHECK_EQUAL(piece.in[0].to, uint64_t{8});
  CHECK_EQUAL(piece.in[0].bytes, uint64_t{10});
  CHECK_EQUAL(piece.in[1].from, uint64_t{3000});
  CHECK_EQUAL(piece.in[1].to, uint64_t{18});
  CHECK_EQUAL(piece.in[1].bytes, uint64_t{50});
  CHECK_EQUAL(piece.out.size(), size_t{2});
  CHECK_EQUAL(piece.out[0].from, uint64_t{5});
  CHECK_EQUAL(piece.out[0].to, uint64_t{10030});
  CHECK_EQUAL(piece.out[1].from, uint64_t{15});
  CHECK_EQUAL(piece.out[1].to, uint64_t{11000});
  CHECK_EQUAL(piece.out[1].bytes, uint64_t{40});
  CHECK_EQUAL(piece.out[1].rank, 0);
}

TEST(ways_on_devices_are_chosen_by_cost_and_by_name) {
  const auto chosen = [](DeviceQuestion question) {
    const auto all = explain_devices(question);
    size_t found = 0;
    for (const DeviceCandidate& c : all) found += c.chosen;
    CHECK_EQUAL(found, size_t{1});
    return std::string(name_of(choose_device_way(question)));
  };
  const DeviceQuestion small{.bytes = 1024, .ranks = 2, .spin_bytes = 0};
  DeviceQuestion apart = small, large = small, other = small;
  apart.spin_bytes = 4096;
  large.bytes = 64 << 20;
  other.spec.kind = Collective::barrier;
  CHECK_EQUAL(chosen(small), std::string("staged"));
  CHECK_EQUAL(chosen(apart), std::string("spin"));
  CHECK_EQUAL(chosen(large), std::string("step"));
  CHECK_EQUAL(chosen(other), std::string("staged"));
  const auto set_to = [](DeviceQuestion question, std::string_view setting) {
    question.asked.way = setting;
    return question;
  };
  CHECK_EQUAL(chosen(set_to(apart, "step")), std::string("step"));
  CHECK_EQUAL(chosen(set_to(small, "step")), std::string("step"));
  CHECK_EQUAL(chosen(set_to(large, "staged")), std::string("staged"));
  CHECK_EQUAL(chosen(set_to(apart, "spin")), std::string("spin"));
  CHECK_EQUAL(chosen(set_to(large, "spin")), std::string("step"));
  CHECK_EQUAL(chosen(set_to(other, "spin")), std::string("staged"));
}

TEST(staged_copies_overlap_where_they_go_in_pieces) {
  DeviceQuestion question{.bytes = 64 << 20, .ranks = 4};
  const auto staged = [&] {
    return device_paths()[static_cast<size_t>(DeviceWay::staged)].seconds(question);
  };
  const double whole = staged();
  question.staged_piece = 64 << 20;
  CHECK_EQUAL(staged(), whole);
  question.staged_piece = 4 << 20;
  CHECK(staged() < 0.7 * whole);  // folds take longer than copies
  CHECK(staged() > 0.5 * whole);
  question.apart = true;
  CHECK_EQUAL(staged(), whole);
  question.apart = false;
  question.asked.planner = "ring";
  CHECK_EQUAL(staged(), whole);
  question.asked.planner = "";
  question.spec.kind = Collective::all_to_all;
  CHECK_EQUAL(staged(), whole);
}

TEST(lanes_are_chosen_between_spin_and_step) {
  const cuda::LaneRoom room{.lanes = 32, .piece_bytes = 8 << 20};
  const auto of = [&](size_t bytes, int ranks, DeviceAsked asked, Collective kind) {
    const Shape shape{.size = ranks, .count = bytes / sizeof(float)};
    DeviceQuestion question =
        question_of({.kind = kind}, DType::float32, Determinism::canonical, shape, asked);
    question.spin_bytes = 256 << 10;
    question.lanes = room;
    return question;
  };
  const auto chosen = [&](size_t bytes, int ranks, DeviceAsked asked = {},
                          Collective kind = Collective::all_reduce) {
    return std::string(name_of(choose_device_way(of(bytes, ranks, asked, kind))));
  };
  for (const int ranks : {2, 4, 8}) {
    const testing::Note note(ranks, " ranks");
    CHECK_EQUAL(chosen(1 << 10, ranks), std::string("spin"));
    CHECK_EQUAL(chosen(2 << 20, ranks), std::string("lanes"));
    CHECK_EQUAL(chosen(1 << 30, ranks), std::string("step"));
    CHECK_EQUAL(chosen(1 << 10, ranks, {"lanes", ""}), std::string("lanes"));
  }
  CHECK_EQUAL(chosen(1 << 10, 8, {"auto", "halving_doubling"}), std::string("lanes"));
  CHECK_EQUAL(chosen(1 << 10, 8, {"step", "halving_doubling"}), std::string("staged"));
  CHECK_EQUAL(chosen(1 << 10, 8, {"auto", "ring"}), std::string("staged"));  // below the level
  CHECK_EQUAL(chosen(64 << 20, 8, {"lanes", ""}, Collective::all_gather), std::string("step"));
  CHECK_EQUAL(chosen(64 << 10, 8, {"lanes", ""}, Collective::all_gather), std::string("lanes"));
  DeviceQuestion question = of(1 << 20, 2, {"lanes", ""}, Collective::broadcast);
  question.apart = true;
  CHECK(choose_device_way(question) == DeviceWay::step);
  question.apart = false;
  question.lanes = {};
  CHECK(choose_device_way(question) == DeviceWay::step);
}

TEST(nccl_is_chosen_where_the_level_allows_it) {
  DeviceQuestion question{.level = Determinism::fast, .bytes = 64 << 20, .ranks = 4};
  const auto why = [&] {
    return why_not(device_paths()[static_cast<size_t>(DeviceWay::nccl)], question);
  };
  CHECK(choose_device_way(question) == DeviceWay::nccl);
  question.no_buckets = "no room";
  CHECK(choose_device_way(question) == DeviceWay::nccl);
  question.no_nccl = "there is none";
  CHECK_EQUAL(why(), std::string("there is none"));
  CHECK(choose_device_way(question) == DeviceWay::staged);
  question.no_nccl = "";
  question.level = Determinism::canonical;
  CHECK(why().find("promises bits") != std::string::npos);
  question.asked.way = "nccl";
  CHECK(why().find("promises bits") != std::string::npos);
  question.spec.kind = Collective::all_gather;
  CHECK_EQUAL(why(), std::string());
  question.asked.way = "auto";
  CHECK_EQUAL(why(), std::string("is taken at level 'fast', or by name"));
  question = {.level = Determinism::fast, .bytes = 64 << 20, .ranks = 4};
  for (const DType dtype : {DType::boolean, DType::int16, DType::uint16}) {
    question.dtype = dtype;
    CHECK(why().find("NCCL folds no ") != std::string::npos);
  }
  question.dtype = DType::int32;
  CHECK_EQUAL(why(), std::string());
  question.spec.op = ReduceOp::mean;
  CHECK(why().find("does not scale integers") != std::string::npos);
  question.dtype = DType::float32;
  CHECK_EQUAL(why(), std::string());
  question.spec.op = ReduceOp::max;
  question.spec.prescale = 2;
  CHECK(why().find("sums and means alone") != std::string::npos);
}

TEST(nccl_sends_less_where_a_switch_joins_the_devices) {
  DeviceQuestion question{.level = Determinism::fast, .bytes = 64 << 20, .ranks = 8};
  const auto seconds = [&] {
    return device_paths()[static_cast<size_t>(DeviceWay::nccl)].seconds(question);
  };
  const double alone = seconds();
  question.switched = true;
  const double switched = seconds();
  CHECK(switched < 0.7 * alone);  // 9 / 8 of the data for each link in place of 14 / 8
  question.ranks = 2;
  question.switched = false;
  const double two = seconds();
  question.switched = true;
  CHECK_EQUAL(seconds(), two);
  question = {.level = Determinism::fast, .bytes = 64 << 20, .ranks = 8, .switched = true};
  question.no_buckets = "its ranks are on several hosts";
  CHECK_EQUAL(seconds(), alone);
  question.no_buckets = "";
  question.spec.kind = Collective::all_gather;
  CHECK_EQUAL(seconds(), alone);
}

TEST(nccl_is_what_devices_of_several_hosts_have) {
  const Shape shape{.size = 16, .count = 16 << 20};
  const CollectiveSpec sum{.kind = Collective::all_reduce};
  const auto chosen = [&](Determinism level, std::string_view setting) {
    DeviceQuestion question = question_of(sum, DType::float32, level, shape, {setting, ""});
    question.no_buckets = "its ranks are on several hosts";
    return std::string(name_of(choose_device_way(question)));
  };
  CHECK_EQUAL(chosen(Determinism::fast, "auto"), std::string("nccl"));
  CHECK_EQUAL(chosen(Determinism::fast, "nccl"), std::string("nccl"));
  CHECK_EQUAL(chosen(Determinism::fast, "step"), std::string("staged"));
  CHECK_EQUAL(chosen(Determinism::canonical, "auto"), std::string("staged"));
}

TEST(nccl_lets_a_switch_fold_means_and_no_scaled_inputs) {
  const Shape shape{.size = 8, .count = 64 << 20};
  const auto seconds = [&](ReduceOp op, double prescale) {
    const CollectiveSpec spec{.kind = Collective::all_reduce, .op = op, .prescale = prescale};
    DeviceQuestion question =
        question_of(spec, DType::float32, Determinism::fast, shape, {"auto", ""});
    question.switched = true;
    return device_paths()[static_cast<size_t>(DeviceWay::nccl)].seconds(question);
  };
  CHECK(seconds(ReduceOp::sum, 1) < seconds(ReduceOp::mean, 1));
  CHECK(seconds(ReduceOp::mean, 1) < seconds(ReduceOp::sum, 0.5));
  CHECK(seconds(ReduceOp::sum, 0.5) < seconds(ReduceOp::mean, 0.5));
}

TEST(nccl_runs_uneven_forms_by_several_of_its_operations) {
  const std::vector<size_t> counts{3, 0, 5};
  const Shape shape{.rank = 2, .size = 3, .count = 8, .counts = counts};
  CollectiveSpec spec{.kind = Collective::reduce_scatter, .op = ReduceOp::mean, .prescale = 6};
  NcclPlan plan = nccl_plan(spec, shape, DType::float32, 1000, 2000, true);
  CHECK_EQUAL(plan.calls.size(), size_t{2});
  CHECK_EQUAL(plan.calls[1].what, int32_t{kNcclReduce});
  CHECK_EQUAL(plan.calls[1].peer, 2);
  CHECK_EQUAL(plan.calls[1].input, uint64_t{1000 + 3 * 4});
  CHECK_EQUAL(plan.calls[1].output, uint64_t{2000});
  CHECK_EQUAL(plan.calls[1].count, uint64_t{5});
  CHECK_EQUAL(plan.factor, 6.0);
  CHECK_EQUAL(plan.finish, 1.0 / 3);
  CHECK(plan.op == ReduceOp::sum);
  plan = nccl_plan(spec, shape, DType::float32, 1000, 2000, false);
  CHECK_EQUAL(plan.factor, 2.0);
  CHECK_EQUAL(plan.finish, 1.0);
  spec.kind = Collective::all_gather;
  plan = nccl_plan(spec, shape, DType::float32, 1000, 2000, true);
  CHECK_EQUAL(plan.calls.size(), size_t{2});
  CHECK_EQUAL(plan.calls[1].what, int32_t{kNcclBroadcast});
  CHECK_EQUAL(plan.calls[1].output, uint64_t{2000 + 3 * 4});
  CHECK_EQUAL(plan.calls[1].count, uint64_t{5 * 4});
  CHECK(plan.dtype == DType::uint8);
  spec.kind = Collective::all_to_all;
  const Shape member{.rank = 1, .size = 2, .count = 4};
  plan = nccl_plan(spec, member, DType::int16, 1000, 2000, true);
  CHECK_EQUAL(plan.calls.size(), size_t{4});
  CHECK_EQUAL(plan.calls[2].what, int32_t{kNcclSend});
  CHECK_EQUAL(plan.calls[2].input, uint64_t{1000 + 8});
  CHECK_EQUAL(plan.calls[2].count, uint64_t{8});
  spec.kind = Collective::reduce;
  plan = nccl_plan(spec, member, DType::float32, 1000, 0, true);
  CHECK_EQUAL(plan.calls.size(), size_t{1});
  CHECK_EQUAL(plan.calls[0].what, int32_t{kNcclReduce});
  CHECK_EQUAL(plan.calls[0].peer, 0);
  spec.kind = Collective::gather;
  plan = nccl_plan(spec, member, DType::int16, 1000, 0, true);
  CHECK_EQUAL(plan.calls.size(), size_t{1});
  CHECK_EQUAL(plan.calls[0].what, int32_t{kNcclSend});
  spec.kind = Collective::scatter;
  const Shape root{.rank = 0, .size = 2, .count = 4};
  plan = nccl_plan(spec, root, DType::int16, 1000, 2000, true);
  CHECK_EQUAL(plan.calls.size(), size_t{3});
  CHECK_EQUAL(plan.calls[1].input, uint64_t{1000 + 8});
  CHECK_EQUAL(plan.calls[2].what, int32_t{kNcclReceive});
  CHECK_EQUAL(plan.calls[2].output, uint64_t{2000});
}
