// One collective of a simulated world: drawn from a seed, given to every rank, checked on every
// rank against a reference.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "stream/operation.h"
#include "transport/segment.h"

namespace farandole {

using SimRandom = std::mt19937_64;

/// One rank's operation, its memory and the output that it must have.
class SimShare {
 public:
  /// Allocates in `arena` or, if that is null, on the heap.
  SimShare(const Operation& what, std::vector<std::byte> input, std::vector<std::byte> expected,
           size_t in_place_at, std::shared_ptr<Arena> arena);
  ~SimShare();
  SimShare(const SimShare&) = delete;
  SimShare& operator=(const SimShare&) = delete;

  const Operation& operation() const { return operation_; }
  bool is_right() const;

 private:
  Operation operation_;
  std::vector<std::byte> expected_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::byte> heap_;
  std::byte* memory_ = nullptr;
};

/// The expected end of an operation whose group does not fail.
enum class SimEnd { right, mismatch, not_shared };

struct SimOperation {
  std::vector<std::shared_ptr<SimShare>> shares;  // by rank in the group
  SimEnd end = SimEnd::right;
  std::string text;  // for a complaint
};

/// `arenas` and `host_of` are by rank in the group. An empty `host_of` means one host.
SimOperation draw_operation(SimRandom& random, const std::vector<std::shared_ptr<Arena>>& arenas,
                            const std::vector<int>& host_of);

}  // namespace farandole
