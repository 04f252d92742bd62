// Many moves by one kernel: copies into a bucket and out of it take a table, which has to lie on
// the device until the kernel has read it. Tables are made with the bucket and used in turn.
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

  /// The kernel's parameters, whose table is on its way in the stream, `backlog` behind: elements
  /// of `width` bytes divide all addresses and lengths. None while all tables are in use: nothing
  /// waits for one here.
  std::optional<Pieces> put(const StreamRef& stream, const Backlog& backlog,
                            std::span<const Move> moves, uint32_t width,
                            const CompletionCount& completions);
  /// The tables that were put since the last end() are read when `number` is reached, or before.
  void end(uint32_t number, const CompletionCount& completions);
  /// Whether pieces before the next one leave half of the tables to it.
  bool has_room(const CompletionCount& completions) const;

 private:
  static constexpr size_t kTables = 128;
  /// In use until its stream comes by a mark, or its operation is complete.
  struct Table {
    const Backlog* backlog = nullptr;  // null: it is not
    uint32_t mark = 0;
    std::optional<uint32_t> number;  // none: the operation is not whole yet
  };
  static bool is_free(const Table& table, const CompletionCount& completions);
  DevicePointer offset_of(size_t table) const { return table * kMovesOfTable * sizeof(Piece); }

  PinnedMemory here_;
  std::unique_ptr<DeviceMemory> there_;
  std::array<Table, kTables> tables_{};
  size_t next_ = 0;
};

}  // namespace farandole::cuda
