#include "fusion/bucket_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>

#include "base/hash.h"

namespace farandole {
namespace {

constexpr size_t kLineBytes = 64;

size_t aligned(size_t count, size_t element) {
  const size_t step = kLineBytes / element;
  return (count + step - 1) / step * step;
}

bool is_alone(const Parameter& p, const BucketLimits& limits) {
  return p.count > 0 && p.count * size_of(p.dtype) >= limits.alone_bytes;
}

Bucket alone(int parameter, const Parameter& p) {
  return {p.dtype, p.count, {{parameter, 0, p.count}}, true, p.group};
}

void append(Bucket& bucket, int parameter, const Parameter& p) {
  bucket.dtype = p.dtype;
  bucket.placements.push_back({parameter, bucket.count, p.count});
  bucket.count += aligned(p.count, size_of(p.dtype));
}

/// The buckets of one group: one of each dtype, and one of each large tensor.
std::vector<Bucket> group_buckets(std::span<const Parameter> parameters,
                                  std::span<const int> members, const BucketLimits& limits) {
  std::vector<Bucket> buckets;
  std::map<DType, size_t> of_dtype;
  for (const int i : members) {
    const Parameter& p = parameters[static_cast<size_t>(i)];
    if (is_alone(p, limits)) {
      buckets.push_back(alone(i, p));
      continue;
    }
    const auto [at, is_new] = of_dtype.try_emplace(p.dtype, buckets.size());
    if (is_new) buckets.push_back({.dtype = p.dtype, .placements = {}, .group = p.group});
    append(buckets[at->second], i, p);
  }
  return buckets;
}

}  // namespace

std::vector<Bucket> plan_buckets(std::span<const Parameter> in_ready_order,
                                 const BucketLimits& limits) {
  std::vector<int> order(in_ready_order.size());
  std::iota(order.begin(), order.end(), 0);
  return plan_buckets(in_ready_order, order, limits);
}

std::vector<Bucket> plan_buckets(std::span<const Parameter> parameters,
                                 std::span<const int> ready_order, const BucketLimits& limits) {
  struct Open {
    Bucket bucket;
    size_t complete = 0;  // the place in the order of its last gradient
  };
  std::vector<Bucket> closed;
  std::map<DType, Open> open;
  const auto close = [&](DType dtype) {
    closed.push_back(std::move(open[dtype].bucket));
    open.erase(dtype);
  };
  const auto limit = [&] {
    return closed.empty() ? std::min(limits.first_bytes, limits.bytes) : limits.bytes;
  };
  std::map<int, std::ptrdiff_t> group_sizes;
  for (const Parameter& p : parameters) ++group_sizes[p.group];
  std::map<int, std::vector<int>> ready;  // by group
  for (size_t at = 0; at < ready_order.size(); ++at) {
    const Parameter& p = parameters[static_cast<size_t>(ready_order[at])];
    if (p.group != kNoGroup) {
      std::vector<int>& members = ready[p.group];
      members.push_back(ready_order[at]);
      if (std::ssize(members) == group_sizes[p.group])
        std::ranges::move(group_buckets(parameters, members, limits), std::back_inserter(closed));
      continue;
    }
    if (is_alone(p, limits)) {
      closed.push_back(alone(ready_order[at], p));
      continue;
    }
    // A tensor that would overfill its bucket opens a new one.
    if (const auto it = open.find(p.dtype);
        it != open.end() && (it->second.bucket.count + p.count) * size_of(p.dtype) > limit())
      close(p.dtype);
    auto& [bucket, complete] = open[p.dtype];
    append(bucket, ready_order[at], p);
    complete = at;
    if (bucket.bytes() >= limit()) close(p.dtype);
  }
  // The buckets that are left, in the order in which they become complete.
  std::vector<Open> rest;
  for (auto& [dtype, left] : open) rest.push_back(std::move(left));
  std::sort(rest.begin(), rest.end(),
            [](const Open& a, const Open& b) { return a.complete < b.complete; });
  for (Open& left : rest) closed.push_back(std::move(left.bucket));
  return closed;
}

size_t end_of_launch(std::span<const Bucket> buckets, size_t begin) {
  size_t end = begin + 1;
  if (buckets[begin].group != kNoGroup)
    while (end < buckets.size() && buckets[end].group == buckets[begin].group) ++end;
  return end;
}

double launch_point(std::span<const Parameter> parameters, std::span<const Bucket> buckets,
                    std::span<const int> ready_order) {
  std::vector<double> ready(parameters.size());  // bytes of gradients made so far
  double made = 0;
  for (const int i : ready_order) {
    const Parameter& p = parameters[static_cast<size_t>(i)];
    ready[static_cast<size_t>(i)] = made += static_cast<double>(p.count * size_of(p.dtype));
  }
  double launched = 0, sum = 0, bytes = 0;
  for (size_t begin = 0; begin < buckets.size();) {
    const size_t end = end_of_launch(buckets, begin);
    double together = 0;
    for (; begin < end; ++begin) {
      for (const Placement& item : buckets[begin].placements)
        launched = std::max(launched, ready[static_cast<size_t>(item.parameter)]);
      together += static_cast<double>(buckets[begin].bytes());
    }
    sum += launched * together;
    bytes += together;
  }
  return made > 0 ? sum / bytes / made : 1;
}

uint64_t fingerprint(std::span<const Parameter> parameters, std::span<const Bucket> buckets) {
  Hash hash;
  const auto add = [&](auto... numbers) { (hash.add(static_cast<uint64_t>(numbers)), ...); };
  for (const Parameter& p : parameters) {
    hash.add(p.name);
    add(p.count, p.dtype, p.group - kNoGroup);
  }
  for (const Bucket& b : buckets) {
    add(b.count, b.placements.size(), b.alone);
    for (const Placement& p : b.placements) add(p.parameter, p.offset);
  }
  return hash.value();
}

}  // namespace farandole
