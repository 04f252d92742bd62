// Gather and scatter of buckets against csrc/fold's casts and scales.
#include "base/half.h"
#include "cases.h"
#include "check.h"
#include "fold/cast.h"

namespace farandole::cuda {
namespace {

Bytes cast_to(DType to, const Bytes& elements, DType from) {
  const size_t count = elements.size() / size_of(from);
  Bytes out(count * size_of(to));
  cast(out.data(), to, elements.data(), from, count);
  return out;
}

/// Tensors of these lengths into one bucket, in which they lie one behind the other, or back.
struct Bucket {
  std::vector<size_t> counts;
  size_t tensor_offset;  // of every tensor, behind a pack
};

void compare(const char* what, DType from, DType to, const Bucket& bucket, const Scale& by) {
  const testing::Note note(what, " ", name_of(from), " ", name_of(to), " by ", by.factor);
  const bool gathers = what[0] == 'g';
  std::vector<Array> in, out;
  std::vector<Piece> pieces;
  size_t whole = 0;
  for (const size_t count : bucket.counts) whole += count;
  const Bytes data = some_elements(from, whole, whole);
  const Array bucket_in(from, data), bucket_out(to, whole);
  size_t at = 0;
  for (const size_t count : bucket.counts) {
    const auto* begin = data.data() + at * size_of(from);
    const Bytes elements(begin, begin + count * size_of(from));
    const Array& tensor = gathers ? in.emplace_back(from, elements, bucket.tensor_offset)
                                  : out.emplace_back(to, count, bucket.tensor_offset);
    pieces.push_back({.from = gathers ? tensor.data() : bucket_in.data() + at * size_of(from),
                      .to = gathers ? bucket_out.data() + at * size_of(to) : tensor.data(),
                      .count = count});
    at += count;
  }
  const Pieces parameters = pieces_of(pieces, pieces.data(), by);
  run(launch_of(kernel_name(what, from, to), parameters, 3, 8));

  const Bytes expected =
      gathers ? scaled(cast_to(to, data, from), to, by) : cast_to(to, scaled(data, from, by), from);
  Bytes got;
  if (gathers) {
    got = bucket_out.bytes();
    CHECK(bucket_out.surroundings_are_intact());
  }
  for (const Array& tensor : out) {
    const Bytes part = tensor.bytes();
    got.insert(got.end(), part.begin(), part.end());
    CHECK(tensor.surroundings_are_intact());
  }
  CHECK(got == expected);
}

TEST(cuda_buckets_of_every_dtype_are_gathered_and_scattered) {
  for (const DTypeRow& from : kDTypes)
    for (const DTypeRow& to : kDTypes) {
      if (!has_cast(from.dtype, to.dtype)) {
        CHECK(kernel_named(kernel_name("gather", from.dtype, to.dtype)) == nullptr);
        continue;
      }
      // A cast of a dtype to itself copies: NaNs keep their payload unless they are scaled.
      for (const char* what : {"gather", "scatter"})
        for (const double factor : {1.0, 0.37})
          for (const size_t offset : {0, 1})
            compare(what, from.dtype, to.dtype, {{1, 7, 64, 3, 129}, offset}, {.factor = factor});
    }
}

TEST(cuda_buckets_have_pieces_of_many_chunks) {
  const std::vector<size_t> counts{kChunkElements - 1, kChunkElements, 1, 2 * kChunkElements + 5};
  compare("gather", DType::float32, DType::bfloat16, {counts, 0}, {.factor = 0.5});
  compare("scatter", DType::float16, DType::float32, {counts, 3}, {.factor = 0.5});
}

/// Threads look for a chunk's piece together, and each has several pieces then.
TEST(cuda_buckets_of_more_pieces_than_threads) {
  for (const size_t pieces : {7, 8, 9, 16, 17, 31}) {
    const testing::Note note(pieces, " pieces");
    std::vector<size_t> counts;
    for (size_t i = 0; i < pieces; ++i) counts.push_back(i % 5 == 3 ? kChunkElements + 1 : i + 1);
    compare("gather", DType::int16, DType::int16, {counts, 0}, {});
    compare("scatter", DType::float32, DType::float16, {counts, 0}, {});
  }
}

/// Eight threads take kCopiesTogether units at a time; of the last ones there are as many, or
/// fewer.
TEST(cuda_buckets_of_lengths_around_what_threads_take_together) {
  constexpr size_t kTurn = 8 * 4 * 4;  // threads, units of each, elements of float32
  for (const auto& [from, to] : {std::pair{DType::float32, DType::float32},
                                 {DType::float32, DType::bfloat16},
                                 {DType::bfloat16, DType::float32},
                                 {DType::float64, DType::float16},
                                 {DType::int8, DType::int8}})
    for (const size_t offset : {0, 1, 2, 3})
      for (const double factor : {1.0, 0.3})
        for (const char* what : {"gather", "scatter"})
          compare(what, from, to,
                  {{kTurn - 4, kTurn, kTurn + 4, kTurn + 1, 2 * kTurn - 1, 4 * kTurn + 36}, offset},
                  {.factor = factor});
}

TEST(cuda_integers_in_buckets_are_scaled_and_divided) {
  for (const DTypeRow& d : kDTypes)
    if (d.kind == DTypeKind::integer)
      for (const double factor : {1.0, -1.5, 1e18, 0.1})
        compare("scatter", d.dtype, d.dtype, {{50, 51}, 0}, {.factor = factor, .divide = 7});
}

/// Every half, and the numbers half way between two of them with their neighbours, in float64.
TEST(cuda_casts_of_every_half_and_of_what_rounds_to_one) {
  if (testing::kThreadSanitizer) return;
  for (const DType half : {DType::float16, DType::bfloat16}) {
    Bytes halves(size_t{65536} * 2);
    for (size_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(&halves[2 * i], &bits, 2);
    }
    for (const DType wide : {DType::float32, DType::float64}) {
      const testing::Note note(name_of(half), " ", name_of(wide));
      Array in(half, halves), out(wide, 65536);
      Piece piece{.from = in.data(), .to = out.data(), .count = 65536};
      run(launch_of(kernel_name("gather", half, wide), pieces_of({&piece, 1}, &piece, {}), 2, 8));
      const Bytes widened = out.bytes();
      CHECK(widened == cast_to(wide, halves, half));

      // As integers, neighbours of one sign are one apart: so the middle of two is exact.
      Bytes middles;
      const auto add = [&](uint64_t bits) {
        const auto* from = reinterpret_cast<const std::byte*>(&bits);
        middles.insert(middles.end(), from, from + size_of(wide));
      };
      const size_t size = size_of(wide);
      for (size_t i = 0; i + 1 < 65536; ++i) {
        uint64_t lower = 0, upper = 0;
        std::memcpy(&lower, &widened[i * size], size);
        std::memcpy(&upper, &widened[(i + 1) * size], size);
        const uint64_t middle = lower + (upper - lower) / 2;
        for (const uint64_t bits : {middle - 1, middle, middle + 1}) add(bits);
      }
      const size_t count = middles.size() / size;
      Array from(wide, middles), to(half, count);
      piece = {.from = from.data(), .to = to.data(), .count = count};
      run(launch_of(kernel_name("gather", wide, half), pieces_of({&piece, 1}, &piece, {}), 2, 8));
      CHECK(to.bytes() == cast_to(half, middles, wide));
    }
  }
}

}  // namespace
}  // namespace farandole::cuda
