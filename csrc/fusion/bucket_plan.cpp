#include "fusion/bucket_plan.h"

#include <algorithm>
#include <map>

namespace farandole {
namespace {

constexpr size_t kLineBytes = 64;

size_t aligned(size_t count, size_t element) {
  const size_t step = kLineBytes / element;
  return (count + step - 1) / step * step;
}

uint64_t mix(uint64_t h, uint64_t value) { return (h ^ value) * 0x100000001b3; }

}  // namespace

std::vector<Bucket> plan_buckets(std::span<const Parameter> in_ready_order,
                                 const BucketLimits& limits) {
  std::vector<Bucket> closed;
  std::map<DType, Bucket> open;
  const auto close = [&](DType dtype) {
    closed.push_back(std::move(open[dtype]));
    open.erase(dtype);
  };
  for (size_t i = 0; i < in_ready_order.size(); ++i) {
    const Parameter& p = in_ready_order[i];
    const size_t element = size_of(p.dtype);
    const size_t limit = closed.empty() ? std::min(limits.first_bytes, limits.bytes) : limits.bytes;
    // A tensor that would overfill its bucket opens a new one.
    if (const auto it = open.find(p.dtype);
        it != open.end() && (it->second.count + p.count) * element > limit)
      close(p.dtype);
    Bucket& bucket = open[p.dtype];
    bucket.dtype = p.dtype;
    bucket.items.push_back({static_cast<int>(i), bucket.count, p.count});
    bucket.count += aligned(p.count, element);
    if (bucket.bytes() >=
        (closed.empty() ? std::min(limits.first_bytes, limits.bytes) : limits.bytes))
      close(p.dtype);
  }
  // What is left, in the order in which it becomes complete.
  std::vector<Bucket> rest;
  for (auto& [dtype, bucket] : open) rest.push_back(std::move(bucket));
  std::sort(rest.begin(), rest.end(), [](const Bucket& a, const Bucket& b) {
    return a.items.back().parameter < b.items.back().parameter;
  });
  for (Bucket& bucket : rest) closed.push_back(std::move(bucket));
  return closed;
}

uint64_t fingerprint(std::span<const Parameter> parameters, std::span<const Bucket> buckets) {
  uint64_t h = 0xcbf29ce484222325;
  for (const Parameter& p : parameters) {
    for (const char c : p.name) h = mix(h, static_cast<unsigned char>(c));
    h = mix(mix(h, p.count), static_cast<uint64_t>(p.dtype) + 0x100);
  }
  for (const Bucket& b : buckets) {
    h = mix(mix(h, b.count), b.items.size());
    for (const Placement& p : b.items)
      h = mix(mix(h, static_cast<uint64_t>(p.parameter)), p.offset);
  }
  return h;
}

}  // namespace farandole
