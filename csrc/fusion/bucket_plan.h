// The plan of gradients that are reduced together: a value, computed before any data move.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace farandole {

constexpr int kNoGroup = -1;

struct Parameter {
  std::string name;
  size_t count = 0;
  DType dtype = DType::float32;
  int group = kNoGroup;  // those of one number are launched together, once all of them are ready
};

struct Placement {
  int parameter = 0;  // index into the parameters
  size_t offset = 0;  // elements from the bucket's begin
  size_t count = 0;
};

struct Bucket {
  DType dtype = DType::float32;
  size_t count = 0;  // elements, padding included
  std::vector<Placement> placements;
  bool alone = false;  // one large tensor, which need not be copied to be reduced
  int group = kNoGroup;

  size_t bytes() const { return count * size_of(dtype); }
};

struct BucketLimits {
  size_t bytes = 0;        // a bucket is closed once it holds this much; 0: one tensor each
  size_t first_bytes = 0;  // the first one, small so that communication starts early
  size_t alone_bytes = ~size_t{0};  // a tensor of so much has a bucket of its own
};

/// Parameters in the order in which their gradients become ready, to buckets in the order in which
/// these become complete. One dtype per bucket; placements begin on cache lines. A group has
/// buckets of its own, side by side and as large as it needs.
std::vector<Bucket> plan_buckets(std::span<const Parameter> in_ready_order,
                                 const BucketLimits& limits);
/// The same for parameters that become ready in the order of these indices.
std::vector<Bucket> plan_buckets(std::span<const Parameter> parameters,
                                 std::span<const int> ready_order, const BucketLimits& limits);

/// Past the buckets that are launched together with that of index `begin`.
size_t end_of_launch(std::span<const Bucket> buckets, size_t begin);

/// How far backward is, from 0 to 1, when the average byte can be launched: buckets go strictly in
/// plan order, each when its last gradient is ready. Backward is measured in bytes of gradients.
double launch_point(std::span<const Parameter> parameters, std::span<const Bucket> buckets,
                    std::span<const int> ready_order);

/// Equal on two ranks when their plans are: names, counts, dtypes, places.
uint64_t fingerprint(std::span<const Parameter> parameters, std::span<const Bucket> buckets);

}  // namespace farandole
