// Schedules on a device: planned once, and kept there to be run again.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/driver/completion.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/stream.h"
#include "cuda/plans.h"

namespace farandole::cuda {

/// A table as farandole_lanes_<dtype> takes it.
struct LanesThere {
  const LaneStep* steps = nullptr;
  const uint32_t* first = nullptr;
  uint32_t lanes = 0;
  uint64_t scratch = 0;  // elements
};

/// The tables of one rank. The least recently used ones make room for others.
class LaneTables {
 public:
  /// Takes room for many at once: to allocate it later may wait for all that runs on the device,
  /// kernels that wait for other ranks included.
  LaneTables(std::shared_ptr<const DeviceContext> context, uint32_t rank, uint32_t size);

  /// Good for what follows in the stream, until end().
  const LanesThere& get(const StreamRef& stream, const LanesAsked& asked,
                        const CompletionCount& completions);
  /// The tables that were asked for since the last end() are read when `number` is reached.
  void end(uint32_t number);

 private:
  static constexpr size_t kRoom = 4 << 20, kFewest = 8;  // bytes of all, and tables
  struct Memory {
    Memory(const std::shared_ptr<const DeviceContext>& context, size_t bytes)
        : here(context, bytes), there(allocate_device(context, bytes, Sharing::none)) {}
    PinnedMemory here;
    std::unique_ptr<DeviceMemory> there;
  };
  /// A stretch of memory, and what is in it.
  struct Table {
    std::shared_ptr<const Memory> memory;
    size_t offset = 0, bytes = 0;
    LanesAsked asked{};
    LanesThere plan{};
    std::optional<uint32_t> read_at = 0;  // none: not known yet
  };

  Table& room_for(size_t bytes, const CompletionCount& completions);

  std::shared_ptr<const DeviceContext> context_;
  uint32_t rank_, size_;
  size_t kept_;
  std::list<Table> tables_;  // the most recently used first
};

}  // namespace farandole::cuda
