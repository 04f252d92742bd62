// The optimizer's step on a device against csrc/fold's.
#include "cases.h"
#include "check.h"
#include "fold/update.h"

namespace farandole::cuda {
namespace {

/// One parameter's arrays, on the device and on the host.
struct Parameter {
  Parameter(DType dtype, size_t count, size_t offset, uint64_t seed)
      : host{some_elements(dtype, count, seed), some_elements(dtype, count, seed + 1),
             some_elements(dtype, count, seed + 2), some_elements(dtype, count, seed + 3)},
        shared(dtype, count, offset) {
    for (const Bytes& bytes : host) there.emplace_back(dtype, bytes, offset);
  }

  UpdatePiece piece(UpdateKind kind, const UpdateFactors& factors, size_t count) const {
    return {.value = there[0].data(),
            .shared = shared.data(),
            .gradient = there[1].data(),
            .state = {there[2].data(), there[3].data()},
            .count = count,
            .kind = kind,
            .factors = factors};
  }
  void update_here(UpdateKind kind, DType dtype, const UpdateFactors& factors, size_t count) {
    farandole::update(kind, dtype,
                      {host[0].data(), host[1].data(), {host[2].data(), host[3].data()}, count},
                      factors);
  }

  std::vector<Array> there;
  Bytes host[4];  // value, gradient, first and second state
  Array shared;
};

UpdateFactors some_factors(int number) {
  UpdateFactors f;
  f.gradient = number % 2 == 0 ? 1 : -0.37;
  f.decay = number % 3 == 0 ? 0.01 : 0;
  f.shrink = number % 4 == 0 ? 1 : 0.999;
  f.keep_first = 0.9;
  f.take_first = number % 5 == 0 ? 0.7 : 0.1;  // lerp's two branches
  f.keep_second = 0.999;
  f.take_second = 0.001;
  f.step = -0.01;
  f.root = 0.3;
  f.epsilon = 1e-8;
  f.fresh = number % 7 == 0;
  f.nesterov = number % 2 == 1;
  return f;
}

/// All in one launch, each with factors of its own.
void compare(DType dtype, const std::vector<size_t>& counts, size_t offset, uint32_t blocks) {
  std::vector<Parameter> parameters;
  std::vector<UpdatePiece> pieces;
  const auto kind_at = [](size_t i) { return static_cast<UpdateKind>(i % kUpdateNames.size()); };
  for (size_t i = 0; i < counts.size(); ++i) {
    parameters.emplace_back(dtype, counts[i], offset, 10 * i);
    pieces.push_back(parameters[i].piece(kind_at(i), some_factors(static_cast<int>(i)), counts[i]));
  }
  run(launch_of(kernel_name("update", dtype), updates_of(pieces), blocks, 8));
  for (size_t i = 0; i < counts.size(); ++i) {
    const testing::Note note(name_of(dtype), " ", kUpdateNames[i % kUpdateNames.size()], " of ",
                             counts[i], " behind ", offset);
    Parameter& p = parameters[i];
    p.update_here(kind_at(i), dtype, some_factors(static_cast<int>(i)), counts[i]);
    for (size_t a = 0; a < p.there.size(); ++a) {
      CHECK(p.there[a].bytes() == p.host[a]);
      CHECK(p.there[a].surroundings_are_intact());
    }
    CHECK(p.shared.bytes() == p.host[0]);
    CHECK(p.shared.surroundings_are_intact());
  }
}

TEST(cuda_updates_have_the_bits_of_the_processors) {
  for (const DType dtype : {DType::float32, DType::float64})
    for (const size_t offset : {0, 1})
      compare(dtype, {1, 2, 3, 64, 65, 129, 500, 501, 502, 1001, 1002, 1003, 5, 16, 17}, offset, 3);
}

TEST(cuda_updates_take_many_chunks) {
  compare(DType::float32, {kChunkElements - 1, kChunkElements, 1, 2 * kChunkElements + 5}, 0, 5);
  compare(DType::float64, {2 * kChunkElements + 1, 3, kChunkElements + 2}, 1, 2);
}

TEST(cuda_updates_of_arrays_that_lie_differently_go_one_by_one) {
  const size_t count = 100;
  Parameter p(DType::float32, count, 0, 1);
  const Array gradient(DType::float32, p.host[1], 3);
  const UpdateFactors factors = some_factors(1);
  std::vector<UpdatePiece> pieces{p.piece(UpdateKind::adam, factors, count)};
  pieces[0].gradient = gradient.data();
  run(launch_of(kernel_name("update", DType::float32), updates_of(pieces), 2, 8));
  p.update_here(UpdateKind::adam, DType::float32, factors, count);
  for (const size_t a : {0, 2, 3}) CHECK(p.there[a].bytes() == p.host[a]);
}

TEST(cuda_updates_are_of_no_other_dtype) {
  for (const DTypeRow& row : kDTypes)
    CHECK_EQUAL(kernel_named(kernel_name("update", row.dtype)) != nullptr, can_update(row.dtype));
}

}  // namespace
}  // namespace farandole::cuda
