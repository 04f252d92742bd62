// Small arrays that travel as one operation: which ones, and their way through memory that all
// ranks map. The bits are those of separate operations: folds are elementwise.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "stream/operation.h"
#include "transport/buffer_pool.h"

namespace farandole {

/// One array of a call: what goes in and what comes out, the same memory for one in place.
struct Operand {
  Buffer input, output;
};

/// One array of the order, by what all ranks know of it.
struct Packable {
  uint32_t set = 0;  // those of different ranks do not travel together
  CollectiveSpec spec;
  DType dtype = DType::float32;
  size_t bytes = 0;  // of the longer of input and output, on the rank where that is longest
  bool alone = false;
};

struct PackLimits {
  size_t together;  // bytes of a pack
  size_t alone;     // an array this long goes by itself: packing it costs more than an operation

  bool travels_alone(size_t bytes) const { return bytes >= alone || bytes > together; }
};

/// Indices of the arrays, by operation. Operations are in the order of their first arrays; an array
/// joins the newest pack of its likes that has room, over others that lie between.
std::vector<std::vector<size_t>> plan_packs(std::span<const Packable> order,
                                            const PackLimits& limits);

/// Arrays of one dtype as the operand of one operation: an all_reduce or broadcast in place, a
/// reduce_scatter or an all_gather. Where ranks own parts, those of one owner lie side by side, so
/// that they are one part of the whole.
class Pack {
 public:
  /// `size`: ranks.
  Pack(Collective kind, int size, std::vector<Operand> operands);

  /// The operand of the operation, once the pack is full.
  const Operand& operand() const { return whole_; }
  /// Holds its memory, and what else the operation needs: its owner may go before it ends.
  std::shared_ptr<const void> kept_with(std::shared_ptr<const void> other) const;
  /// The parts of arrays in it, one behind the other.
  std::vector<Buffer> inputs() const;
  std::vector<Buffer> outputs() const;
  /// Elements of each owner, of a reduce_scatter; none of others.
  std::vector<size_t> counts() const;

  /// Memory of the pool, kept until the pack ends.
  void reserve(BufferPool& pool);
  /// Copy inputs into it and, later, results out, while `budget`, in bytes, lasts: true when all
  /// are. It falls by what was copied, and suffices for at least one array unless it is 0.
  bool fill(size_t& budget);
  bool unpack(size_t& budget);
  /// Once: no piece is left after it.
  void unpack_all();

 private:
  Shape shape_of(const Operand& operand) const;
  Buffer input_piece(size_t index) const;
  Buffer output_piece(size_t index) const;
  size_t pieces_of(Collective by_owner) const;
  template <typename Copy>
  bool copy_pieces(size_t pieces, size_t& budget, const Copy& copy);

  Collective kind_;
  int size_;
  std::vector<Operand> operands_;
  Operand whole_;
  std::shared_ptr<std::byte> sent_, arrived_;
  size_t copied_ = 0;  // pieces, in or out
  size_t at_ = 0;      // bytes that they took
};

/// Opens when the arrays of a pack have come, and have been copied into it.
class PackGate : public Gate {
 public:
  /// `arrays`: of those that are on their way.
  PackGate(std::shared_ptr<Gate> arrays, std::shared_ptr<Pack> pack)
      : arrays_(std::move(arrays)), pack_(std::move(pack)) {}

  bool is_open() override;
  std::string awaited() const override { return arrays_->awaited(); }

 private:
  std::shared_ptr<Gate> arrays_;
  std::shared_ptr<Pack> pack_;
  bool filled_ = false;
};

/// `run`: Options or an Operation, which then runs on the pack. The pack is filled once the arrays
/// have come, and kept until the operation has ended.
template <typename Run>
void run_on(const std::shared_ptr<Pack>& pack, Run& run) {
  run.gate = std::make_shared<PackGate>(run.gate, pack);
  run.keepalive = pack->kept_with(std::move(run.keepalive));
}

}  // namespace farandole
