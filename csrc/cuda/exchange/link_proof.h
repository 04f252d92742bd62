// Proves the links between devices: some machines say that devices reach each other and then drop
// what one writes to the other (PCIe with ACS or a translating IOMMU, virtual machines). Each rank
// writes a pattern into every other's bucket, by a kernel and by its stream, and reads the pattern
// that the owner has there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/driver/stream.h"

namespace farandole::cuda {

class LinkProof {
 public:
  /// `bytes`: the memory that every bucket has for it, which nothing else uses meanwhile.
  LinkProof(std::shared_ptr<const DeviceContext> context, uint32_t rank, uint32_t size,
            uint64_t bytes);

  /// The bucket of a rank, this one included.
  void know(uint32_t rank, const AllocationId& id, const DeviceUuid& device, DevicePointer at);
  /// Puts this rank's own pattern where others will read it. `copy`: the kernel that folds uint32.
  void show(const StreamRef& stream, const DeviceFunction& copy);
  /// Once all buckets are known: writes to all of them and reads from them. `by_words`: the stream
  /// writes the last word. Throws Error(device) where it reads something else.
  void write(const StreamRef& stream, const DeviceFunction& copy, bool by_words);
  /// Once all have written: whether all of it has come, or the time for it has passed. `words`:
  /// whether those that streams write have come, too. Throws Error(device) where a pattern has not.
  bool has_come(const StreamRef& stream, bool& words);

 private:
  struct Bucket {
    uint32_t seed = 0;  // of this bucket alone
    DeviceUuid device{};
    DevicePointer at = 0;
  };

  DevicePointer slot(uint32_t owner, uint32_t writer) const;
  uint64_t words() const { return slot_bytes_ / sizeof(uint32_t); }
  uint32_t word(uint32_t owner, uint32_t writer, uint64_t index) const;
  void put(const StreamRef& stream, const DeviceFunction& copy, uint32_t owner, uint64_t words);
  bool got(uint32_t owner, uint32_t writer, uint64_t first, uint64_t words) const;
  void fold(const StreamRef& stream, const DeviceFunction& copy, DevicePointer to,
            DevicePointer from, uint64_t words) const;
  void finish(const StreamRef& stream) const;
  std::string label_of(uint32_t rank) const;

  std::shared_ptr<const DeviceContext> context_;
  uint32_t rank_, size_;
  uint64_t slot_bytes_;  // of each writer in each bucket
  std::vector<Bucket> buckets_;
  PinnedMemory out_, in_;  // a slot each
  TimePoint until_{};      // the time for what others have written
};

}  // namespace farandole::cuda
