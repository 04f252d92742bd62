// Folds alone, without peers: every dtype and operation against csrc/fold, bit by bit.
#include "cases.h"
#include "check.h"

namespace farandole::cuda {
namespace {

constexpr uint32_t kBlocks = 2, kFewThreads = 8;

Launch fold_launch(const Fold& job, DType dtype) {
  return launch_of(kernel_name("fold", dtype), job, kBlocks, kFewThreads);
}

/// Where arrays begin: `offset` elements behind a pack, each `apart` more than the one before.
struct Layout {
  size_t offset, apart;
};

/// Folds to two destinations, of which one is the last source.
void compare(std::span<const Bytes> leaves, const Folding& folding, const Layout& layout) {
  std::vector<Array> arrays;
  for (size_t i = 0; i < leaves.size(); ++i)
    arrays.emplace_back(folding.dtype, leaves[i], layout.offset + i * layout.apart);
  const size_t count = leaves[0].size() / size_of(folding.dtype);
  const Array out(folding.dtype, count, layout.offset);
  void* const outputs[] = {out.data(), arrays.back().data()};
  const Fold job = fold_of(addresses(arrays), outputs, 0, count, folding);
  run(fold_launch(job, folding.dtype));
  const Bytes expected = folded(leaves, folding);
  CHECK(out.bytes() == expected);
  CHECK(arrays.back().bytes() == expected);
  CHECK(out.surroundings_are_intact());
  for (const Array& array : arrays) CHECK(array.surroundings_are_intact());
}

std::vector<Bytes> some_leaves(DType dtype, size_t ranks, size_t count, uint64_t seed) {
  std::vector<Bytes> leaves;
  for (size_t r = 0; r < ranks; ++r) leaves.push_back(some_elements(dtype, count, seed * 100 + r));
  return leaves;
}

template <typename Body>
void for_every_folding(Body body) {
  for (const DTypeRow& d : kDTypes)
    for (const ReduceOpRow& o : kReduceOps)
      if (has_meaning(o.op, d.dtype)) {
        const testing::Note note(d.name, " ", o.name);
        body(d.dtype, o.op);
      }
}

TEST(cuda_folds_of_every_dtype_operation_and_count) {
  if (testing::kThreadSanitizer) return;  // blocks that share nothing
  uint64_t seed = 0;
  for_every_folding([&](DType dtype, ReduceOp op) {
    for (const size_t ranks : {1, 2, 3, 5, 7, 8})
      for (const size_t count : {0, 1, 7, 33, 257}) {
        const testing::Note note(ranks, " ranks, ", count, " elements");
        const std::vector<Bytes> leaves = some_leaves(dtype, ranks, count, ++seed);
        for (const Layout& layout : {Layout{0, 0}, Layout{3, 0}, Layout{1, 1}})
          compare(leaves, {dtype, op, scales_for(dtype, op, 1, 1, static_cast<int>(ranks))},
                  layout);
      }
  });
}

/// Threads take several packs at a time of sums of two; of the last ones there are as many, or
/// fewer.
TEST(cuda_folds_of_lengths_around_what_threads_take_together) {
  if (testing::kThreadSanitizer) return;
  uint64_t seed = 0;
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::int8}) {
    const size_t pack = 16 / size_of(dtype), turn = size_t{kBlocks} * kFewThreads * pack;
    for (const size_t ranks : {1, 2, 3, 4, 6, 8, 9})
      for (const size_t count : {turn - 1, turn, turn + 1, 2 * turn - pack, 2 * turn,
                                 2 * turn + pack, 3 * turn + 1, 4 * turn - 1})
        for (const double prescale : {1.0, 0.7})
          for (const Layout& layout : {Layout{0, 0}, Layout{1, 0}, Layout{1, 1}}) {
            const testing::Note note(name_of(dtype), ", ", ranks, " ranks, ", count, " elements");
            const Scales scales = scales_for(dtype, ReduceOp::sum, prescale, 1 / prescale, 1);
            compare(some_leaves(dtype, ranks, count, ++seed), {dtype, ReduceOp::sum, scales},
                    layout);
          }
  }
}

TEST(cuda_folds_scale_leaves_and_result) {
  if (testing::kThreadSanitizer) return;
  uint64_t seed = 0;
  for_every_folding([&](DType dtype, ReduceOp op) {
    for (const size_t ranks : {1, 2, 5})
      for (const double prescale : {1.0, 0.7, 1e300, 0.0}) {
        const testing::Note note(ranks, " ranks, prescale ", prescale);
        const Scales scales = scales_for(dtype, op, prescale, 1.3, static_cast<int>(ranks));
        compare(some_leaves(dtype, ranks, 101, ++seed), {dtype, op, scales}, {1, 0});
      }
  });
}

TEST(cuda_folds_of_more_ranks_than_registers_hold) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::int32})
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product})
      for (const size_t ranks : {9, 13, 16, 17, 24, 33, 63, 64}) {
        const testing::Note note(name_of(dtype), " ", name_of(op), ", ", ranks, " ranks");
        compare(some_leaves(dtype, ranks, 37, ranks), {dtype, op}, {0, 0});
      }
}

TEST(cuda_folds_of_every_special_with_every_special) {
  for_every_folding([](DType dtype, ReduceOp op) {
    const Bytes special = specials(dtype);
    const size_t size = size_of(dtype);
    std::vector<Bytes> leaves(2);
    for (size_t a = 0; a < special.size(); a += size)
      for (size_t b = 0; b < special.size(); b += size) {
        leaves[0].insert(leaves[0].end(), &special[a], &special[a] + size);
        leaves[1].insert(leaves[1].end(), &special[b], &special[b] + size);
      }
    compare(leaves, {dtype, op}, {0, 0});
  });
}

TEST(cuda_folds_of_every_half_with_every_special) {
  if (testing::kThreadSanitizer) return;
  for (const DType dtype : {DType::float16, DType::bfloat16})
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      const testing::Note note(name_of(dtype), " ", name_of(op));
      Bytes halves(size_t{65536} * 2), others;
      const Bytes special = specials(dtype);
      for (size_t i = 0; i < 65536; ++i) {
        const auto bits = static_cast<uint16_t>(i);
        std::memcpy(&halves[2 * i], &bits, 2);
      }
      for (size_t s = 0; s < special.size(); s += 2) {
        others.clear();
        while (others.size() < halves.size())
          others.insert(others.end(), &special[s], &special[s] + 2);
        const Bytes leaves[] = {halves, others};
        compare(leaves, {dtype, op}, {0, 0});
      }
    }
}

}  // namespace
}  // namespace farandole::cuda
