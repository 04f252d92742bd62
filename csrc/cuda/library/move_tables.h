// Many moves by one kernel: a bucket's gather and scatter take a table, which has to lie on the
// device until the kernel has read it. Tables are made with the bucket and used in turn.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "cuda/driver/completion.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/stream.h"
#include "cuda/kernels/parameters.h"

namespace farandole::cuda {

struct Move {
  DevicePointer to, from;
  uint64_t bytes;
};

/// Moves of a table at most.
inline constexpr uint32_t kMovesOfTable = 512;

class MoveTables {
 public:
  explicit MoveTables(const std::shared_ptr<const DeviceContext>& context);

  /// The kernel's parameters, whose table is on its way in the stream: elements of `width` bytes
  /// divide all addresses and lengths. None while all tables are in use: nothing waits for one.
  std::optional<Pieces> put(const StreamRef& stream, std::span<const Move> moves, uint32_t width,
                            const CompletionCount& completions);
  /// What was put since the last end is read when `number` is reached.
  void end(uint32_t number);

 private:
  static constexpr size_t kTables = 128;  // two for each piece that is under way
  enum class State : uint8_t { free, under_way, ends };
  struct Table {
    State state = State::free;
    uint32_t number = 0;  // ends
  };
  DevicePointer offset_of(size_t table) const { return table * kMovesOfTable * sizeof(Piece); }

  PinnedMemory here_;
  std::unique_ptr<DeviceMemory> there_;
  std::array<Table, kTables> tables_{};
  size_t next_ = 0;
};

}  // namespace farandole::cuda
