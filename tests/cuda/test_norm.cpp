// Terms of a norm on a device against csrc/fold's.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "cases.h"
#include "check.h"
#include "fold/update.h"

namespace farandole::cuda {
namespace {

struct Stretch {
  size_t count, begin;  // elements, and those of its first tile that are before it
};

/// Numbers whose sums differ with the order of additions.
Bytes numbers(DType dtype, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes out(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const double x =
        std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 8));
    const auto narrow = static_cast<float>(x);
    if (dtype == DType::float32)
      std::memcpy(out.data() + 4 * i, &narrow, 4);
    else
      std::memcpy(out.data() + 8 * i, &x, 8);
  }
  return out;
}

/// All in one launch, tile by tile.
void compare(DType dtype, const std::vector<Stretch>& stretches, size_t tile, bool largest,
             uint32_t blocks, uint32_t threads) {
  const size_t element = size_of(dtype);
  std::vector<Array> there;
  std::vector<Bytes> here;
  std::vector<NormPiece> pieces;
  std::vector<double> wanted;
  for (const Stretch& s : stretches) {
    here.push_back(numbers(dtype, s.count, 3 * here.size() + 1));
    there.emplace_back(dtype, here.back(), here.size() % 2);
    pieces.push_back({.gradient = there.back().data(), .count = s.count, .begin = s.begin});
    for (size_t at = 0; at < s.count;) {
      const size_t count = std::min(s.count - at, tile - (s.begin + at) % tile);
      const std::byte* const from = here.back().data() + at * element;
      wanted.push_back(largest ? largest_magnitude(from, count, dtype)
                               : sum_of_squares(from, count, dtype));
      at += count;
    }
  }
  std::vector<double> made(wanted.size() + 1, -7), scratch(norm_scratch(blocks, threads) + 1, -7);
  const Norms job = norms_of(pieces, tile, largest, made.data(), scratch.data());
  CHECK_EQUAL(job.terms, wanted.size());
  run(launch_of(kernel_name("norms", dtype), job, blocks, threads));
  const testing::Note note(name_of(dtype), largest ? " largest" : " squares", ", tiles of ", tile,
                           ", ", blocks, " blocks of ", threads);
  CHECK(std::memcmp(made.data(), wanted.data(), wanted.size() * sizeof(double)) == 0);
  CHECK_EQUAL(made.back(), -7);
  CHECK_EQUAL(scratch.back(), -7);
}

TEST(cuda_norms_have_the_bits_of_the_processors) {
  const std::vector<Stretch> all{{1, 0}, {15, 31}, {32, 0}, {33, 0}, {100, 7}, {1, 31}, {64, 1}};
  for (const DType dtype : {DType::float32, DType::float64})
    for (const bool largest : {false, true}) {
      compare(dtype, all, 32, largest, 3, 64);
      compare(dtype, all, 32, largest, 2, 8);   // fewer threads than lanes
      compare(dtype, all, 32, largest, 1, 40);  // no whole number of terms
    }
}

TEST(cuda_norms_take_tiles_of_an_epilogue) {
  compare(DType::float32, {{5000, 100}, {2048, 0}, {3, 2047}}, 2048, false, 2, 32);
  compare(DType::float64, {{2500, 1000}}, 1024, true, 2, 16);
}

TEST(cuda_norms_of_what_is_no_number) {
  for (const bool largest : {false, true}) {
    Bytes bytes = numbers(DType::float32, 40, 5);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(bytes.data() + 4 * 17, &nan, 4);
    const Array there(DType::float32, bytes, 0);
    double made = 0;
    std::vector<double> scratch(norm_scratch(1, 16));
    const NormPiece piece{.gradient = there.data(), .count = 40};
    run(launch_of(kernel_name("norms", DType::float32),
                  norms_of({&piece, 1}, 64, largest, &made, scratch.data()), 1, 16));
    CHECK(made != made);
  }
}

}  // namespace
}  // namespace farandole::cuda
