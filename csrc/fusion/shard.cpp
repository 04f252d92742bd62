#include "fusion/shard.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "schedule/slicing.h"

namespace farandole {
namespace {

constexpr size_t kShardAlignment = 64;

/// Calls body(update, element, count) for what each parameter that is not skipped has in [first,
/// first + count) of its bucket.
template <typename Body>
void by_parameters(const Shard& shard, size_t first, size_t count, Body body) {
  const std::vector<Placement>& placements = shard.bucket().placements;
  auto item = std::upper_bound(placements.begin(), placements.end(), first,
                               [](size_t at, const Placement& p) { return at < p.offset; });
  if (item != placements.begin()) --item;
  for (; item != placements.end() && item->offset < first + count; ++item) {
    const auto& update = shard.updates[static_cast<size_t>(item - placements.begin())];
    const Slice mine =
        clip({Space::output, item->offset, item->count}, {Space::output, first, count});
    if (!update.skipped && mine.count > 0) body(update, mine.offset, mine.count);
  }
}

}  // namespace

Slice part_of(const Bucket& bucket, int size, int rank) {
  return part({Space::output, 0, bucket.count}, size, rank);
}

Shard::Shard(Bucket bucket, int size, int rank, size_t slots)
    : updates(bucket.placements.size()),
      bucket_(std::move(bucket)),
      part_(part_of(bucket_, size, rank)) {
  for (size_t s = 0; s < slots; ++s) {
    const size_t rounded = (bytes() / kShardAlignment + 1) * kShardAlignment;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kShardAlignment, rounded));
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, rounded);
    state_.emplace_back(memory);
  }
}

void Shard::Free::operator()(std::byte* memory) const { std::free(memory); }

void Shard::apply(std::byte* result, const std::byte* reduced, size_t first, size_t count) {
  const size_t element = size_of(bucket_.dtype);
  by_parameters(*this, first, count, [&](const ParameterUpdate& u, size_t at, size_t here) {
    UpdateArrays arrays{
        result + (at - first) * element, reduced + (at - first) * element, {}, here};
    for (size_t s = 0; s < slots_of(u.kind); ++s)
      arrays.state[s] = state(s) + (at - part_.offset) * element;
    update(u.kind, bucket_.dtype, arrays, u.factors);
  });
}

void Shard::reset(size_t parameter) {
  const size_t element = size_of(bucket_.dtype);
  for (const Placement& item : bucket_.placements) {
    if (static_cast<size_t>(item.parameter) != parameter) continue;
    const Slice mine = clip({Space::output, item.offset, item.count}, part_);
    for (size_t s = 0; s < slots() && mine.count > 0; ++s)
      std::memset(state(s) + (mine.offset - part_.offset) * element, 0, mine.count * element);
  }
}

void PartNorm::apply(std::byte*, const std::byte* reduced, size_t first, size_t count) {
  const DType dtype = shard_->bucket().dtype;
  by_parameters(*shard_, first, count, [&](const ParameterUpdate&, size_t at, size_t here) {
    const std::byte* from = reduced + (at - first) * size_of(dtype);
    add(norm_ == Norm::two ? sum_of_squares(from, here, dtype)
                           : largest_magnitude(from, here, dtype));
  });
}

void PartNorm::add(double term) {
  if (norm_ == Norm::two)
    total_ += term;
  else if (!(term <= total_))
    total_ = total_ != total_ ? total_ : term;  // a NaN stays
}

}  // namespace farandole
