// Copies into buckets and out of them against csrc/fold's scales.
#include "cases.h"
#include "check.h"

namespace farandole::cuda {
namespace {

/// The dtypes that have such a kernel.
constexpr DType kCopied[] = {DType::uint8,   DType::uint16,   DType::uint32,  DType::uint64,
                             DType::float16, DType::bfloat16, DType::float32, DType::float64};

/// Tensors of these lengths into one bucket, in which they lie one behind the other, and back.
struct Bucket {
  std::vector<size_t> counts;
  size_t tensor_offset;  // of every tensor, behind a pack
};

void copy(DType dtype, std::vector<Piece> pieces, const Scale& by) {
  const Pieces parameters = pieces_of(pieces, pieces.data(), by);
  run(launch_of(kernel_name("copy", dtype), parameters, 3, 8));
}

void compare(DType dtype, const Bucket& bucket, const Scale& by) {
  const testing::Note note(name_of(dtype), " by ", by.factor);
  std::vector<Array> in, out;
  std::vector<Piece> there, back;
  size_t whole = 0;
  for (const size_t count : bucket.counts) whole += count;
  const Bytes data = some_elements(dtype, whole, whole);
  const Array between(dtype, whole);
  size_t at = 0;
  for (const size_t count : bucket.counts) {
    const auto* begin = data.data() + at * size_of(dtype);
    const Bytes elements(begin, begin + count * size_of(dtype));
    std::byte* const place = between.data() + at * size_of(dtype);
    there.push_back({.from = in.emplace_back(dtype, elements, bucket.tensor_offset).data(),
                     .to = place,
                     .count = count});
    back.push_back({.from = place,
                    .to = out.emplace_back(dtype, count, bucket.tensor_offset).data(),
                    .count = count});
    at += count;
  }
  copy(dtype, there, by);
  // What is not scaled is copied: NaNs keep their payload.
  CHECK(between.bytes() == scaled(data, dtype, by));
  CHECK(between.surroundings_are_intact());
  copy(dtype, back, {});
  Bytes got;
  for (const Array& tensor : out) {
    const Bytes part = tensor.bytes();
    got.insert(got.end(), part.begin(), part.end());
    CHECK(tensor.surroundings_are_intact());
  }
  CHECK(got == between.bytes());
}

TEST(cuda_buckets_of_every_dtype_are_filled_and_emptied) {
  for (const DType dtype : kCopied)
    for (const double factor : {1.0, 0.37})
      for (const size_t offset : {0, 1})
        compare(dtype, {{1, 7, 64, 3, 129}, offset}, {.factor = factor});
}

TEST(cuda_buckets_have_pieces_of_many_chunks) {
  const std::vector<size_t> counts{kChunkElements - 1, kChunkElements, 1, 2 * kChunkElements + 5};
  compare(DType::bfloat16, {counts, 0}, {.factor = 0.5});
  compare(DType::float32, {counts, 3}, {.factor = 0.5});
}

/// Threads look for a chunk's piece together, and each has several pieces then.
TEST(cuda_buckets_of_more_pieces_than_threads) {
  for (const size_t pieces : {7, 8, 9, 16, 17, 31}) {
    const testing::Note note(pieces, " pieces");
    std::vector<size_t> counts;
    for (size_t i = 0; i < pieces; ++i) counts.push_back(i % 5 == 3 ? kChunkElements + 1 : i + 1);
    compare(DType::uint16, {counts, 0}, {});
  }
}

/// Eight threads take kCopiesTogether units at a time; of the last ones there are as many, or
/// fewer.
TEST(cuda_buckets_of_lengths_around_what_threads_take_together) {
  constexpr size_t kTurn = 8 * 4 * 4;  // threads, units of each, elements of float32
  for (const DType dtype : kCopied)
    for (const size_t offset : {0, 1, 2, 3})
      for (const double factor : {1.0, 0.3})
        compare(dtype,
                {{kTurn - 4, kTurn, kTurn + 4, kTurn + 1, 2 * kTurn - 1, 4 * kTurn + 36}, offset},
                {.factor = factor});
}

}  // namespace
}  // namespace farandole::cuda
