// Folds by a switch between devices: every dtype and operation that it has, by kernels of all ranks
// at once, each of its part. Over memory that "devices" have bound to a multicast object. The
// host's switch folds from the last member to the first.
#include <sys/mman.h>
#include <atomic>

#include <algorithm>

#include "cases.h"
#include "check.h"
#include "devices/nvls_plan.h"
#include "schedule/slicing.h"

namespace farandole::cuda {
namespace {

constexpr size_t kPack = 16;
constexpr uint32_t kNotAborted = 0;

/// Addresses of a multicast object, at which nothing lies, and what its members have bound.
struct Object {
  static constexpr size_t kBytes = 1 << 16;
  std::byte* const base = static_cast<std::byte*>(
      ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::vector<Array> members;
};
Object& object() {
  static auto* const one = new Object;
  return *one;
}

std::vector<void*> members_at(const void* address, size_t) {
  std::vector<void*> all;
  for (const Array& member : object().members)
    all.push_back(member.data() + (static_cast<const std::byte*>(address) - object().base));
  return all;
}

struct NvlsCase {
  DType dtype;
  ReduceOp op;
  uint32_t size;
  size_t count;
};

size_t padded(size_t bytes) { return (bytes + kPack - 1) / kPack * kPack; }

/// Part r of whole packs, as step_plan cuts them.
Launch launch_of(const NvlsCase& now, uint32_t rank, const Scale& finish,
                 const uint32_t* abort = &kNotAborted) {
  const size_t packs = padded(now.count * size_of(now.dtype)) / kPack;
  const Slice mine =
      part({Space::input, 0, packs}, static_cast<int>(now.size), static_cast<int>(rank));
  const NvlsFold job{.packs = mine.count,
                     .formula = row(now.op).formula,
                     .finish = scaling_of(finish),
                     .all = object().base + mine.offset * kPack,
                     .abort = abort};
  return cuda::launch_of(kernel_name("nvls", now.dtype), job, 2, 32);
}

/// Runs the case; returns the memory of the members afterwards.
Bytes run_case(const NvlsCase& now, const std::vector<Bytes>& inputs, const Scale& finish,
               uint64_t seed) {
  const size_t bytes = now.count * size_of(now.dtype);
  object().members.clear();
  for (const Bytes& input : inputs) {
    Array& made = object().members.emplace_back(DType::uint8, padded(bytes));
    made.fill(std::byte{0xff});  // behind the last element
    std::ranges::copy(input, made.data());
  }
  set_multicast(members_at);
  std::vector<Launch> launches;
  for (uint32_t r = 0; r < now.size; ++r) launches.push_back(launch_of(now, r, finish));
  run_together(launches, seed);
  const auto left = [&](const Array& member) {
    CHECK(member.surroundings_are_intact());
    return Bytes(member.data(), member.data() + bytes);
  };
  Bytes first = left(object().members.front());
  for (const Array& member : object().members) CHECK(left(member) == first);
  return first;
}

/// Small integers as elements: their sums are exact in any order.
Bytes small_elements(DType dtype, size_t count, uint32_t rank) {
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<double>((i * (rank + 3) + rank) % 16);
  Bytes made(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const auto put = [&](auto value) {
      std::memcpy(made.data() + i * sizeof value, &value, sizeof value);
    };
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(values[i]));
    if (dtype == DType::float32)
      put(bits);
    else if (dtype == DType::float64)
      put(values[i]);
    else if (dtype == DType::bfloat16)
      put(static_cast<uint16_t>(bits >> 16));
    else  // float16
      put(static_cast<uint16_t>(bits == 0 ? 0 : (bits >> 13) - (112U << 10)));
  }
  return made;
}

bool is_integer(DType dtype) { return row(dtype).kind == DTypeKind::integer; }

}  // namespace

TEST(nvls_folds_of_every_dtype_operation_and_count) {
  size_t kinds = 0;
  for (const DTypeRow& d : kDTypes)
    for (const ReduceOpRow& o : kReduceOps) {
      const CollectiveSpec spec{.kind = Collective::all_reduce, .op = o.op};
      if (!why_not_by_nvls(spec, d.dtype).empty()) continue;
      CHECK(kernel_named(kernel_name("nvls", d.dtype)) != nullptr);
      ++kinds;
      for (const uint32_t size : {2U, 3U, 8U})
        for (const size_t count : {1, 4, 7, 333}) {
          const NvlsCase now{d.dtype, o.op, size, count};
          const testing::Note note(name_of(d.dtype), " ", name_of(o.op), " of ", size, ", ", count);
          std::vector<Bytes> inputs;
          for (uint32_t r = 0; r < size; ++r)
            inputs.push_back(is_integer(d.dtype) ? some_elements(d.dtype, count, size * 100 + r)
                                                 : small_elements(d.dtype, count, r));
          const Folding folding{d.dtype, o.op, scales_for(d.dtype, o.op, 1, 1, int(size))};
          CHECK(run_case(now, inputs, folding.scales.finish, count) == folded(inputs, folding));
        }
    }
  CHECK_EQUAL(kinds, size_t{4 * 2 + 4 * 4});  // sums and means; of integers also min and max
}

TEST(nvls_order_is_the_switchs_own_and_halves_are_rounded_once) {
  const auto sum = [](DType dtype, std::vector<uint32_t> values) {
    std::vector<Bytes> inputs;
    for (const uint32_t value : values) {
      Bytes one(size_of(dtype));
      std::memcpy(one.data(), &value, one.size());
      inputs.push_back(one);
    }
    const NvlsCase now{dtype, ReduceOp::sum, static_cast<uint32_t>(values.size()), 1};
    uint32_t result = 0;
    const Bytes left = run_case(now, inputs, {}, 1);
    std::memcpy(&result, left.data(), left.size());
    return result;
  };
  const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
  CHECK_EQUAL(sum(DType::float32, {bits(1), bits(1e8F), bits(-1e8F)}), bits(1));
  CHECK_EQUAL(sum(DType::float32, {bits(-1e8F), bits(1e8F), bits(1)}), bits(0));
  // 2048 + 1 + 1 of float16: each step alone would be rounded to even, to 2048.
  CHECK_EQUAL(sum(DType::float16, {0x3c00, 0x3c00, 0x6800}), uint32_t{0x6801});
}

TEST(nvls_touches_nothing_once_the_group_is_aborted) {
  static std::atomic<size_t> touched = 0;
  set_multicast([](const void*, size_t) {
    ++touched;
    return std::vector<void*>{};
  });
  const NvlsCase now{DType::float32, ReduceOp::sum, 2, 333};
  for (const uint32_t abort : {0U, 1U}) {
    touched = 0;
    const Launch launches[] = {launch_of(now, 0, {}, &abort), launch_of(now, 1, {}, &abort)};
    run_together(launches, 1);
    CHECK_EQUAL(touched == 0, abort != 0);
  }
}

}  // namespace farandole::cuda
