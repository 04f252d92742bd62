// One operation by steps, as an exchange takes it: piece by piece, each with what it moves
// and folds, and where the arrays lie.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/exchange.h"
#include "devices/step_plan.h"
#include "devices/stretches.h"
#include "fold/update.h"
#include "group/pack.h"
#include "stream/operation.h"

namespace farandole {

/// The update of one parameter, as far as it is in this rank's part.
struct StepUpdate {
  uint64_t value = 0;      // the address of its first element
  Slice whole{};           // where the parameter lies in all of the arrays, in elements
  uint64_t state[2] = {};  // addresses of this rank's part of all of the arrays
  UpdateKind kind = UpdateKind::sgd;
  UpdateFactors factors;
};

/// The norm of an update's gradients, which are only read.
struct StepNorm {
  uint64_t terms = 0;  // the address of the terms, one for each tile of a parameter
  bool largest = false;
};

/// One operation's arrays, as its backend needs them.
struct StepArrays {
  uint64_t input = 0, output = 0;  // addresses
  bool in_place = false;
  double prescale = 1;            // a further factor on the input, which the host applies elsewhere
  std::vector<Operand> together;  // several arrays that travel as one; then there is no address
  Stretches inputs, outputs;      // of these, as parts of the whole
  std::vector<StepUpdate> updates;  // of an all-reduce: inputs are gradients, outputs values
  std::optional<StepNorm> norm;     // there are no outputs, then
  StepMoments moments;              // none in a graph
  std::optional<uint64_t> graph;    // the stream that is being captured, with all of it
  std::shared_ptr<const void> kept;
  std::atomic<bool> launched{false};  // released after `number`
  uint32_t number = 0;
};

/// For people: "all_reduce #7 'fc.weight'".
std::string title_of(const Operation& operation, uint32_t sequence);

class StepPieces {
 public:
  StepPieces() = default;
  /// `shape` is the operation's, and refers to it.
  StepPieces(const Operation& operation, const Shape& shape, const StepArrays& arrays,
             size_t piece_bytes);

  const Shape& shape() const { return step_.shape; }
  size_t size() const { return pieces_of(step_); }
  bool lie_apart() const { return step_.apart; }
  /// A piece for the exchange's first strand. Called in order; good until the next call.
  const CudaPiece& operator[](size_t index);
  /// All elements as one, without moves.
  CudaPiece whole() const;
  /// A piece that is a collective by itself: `count` elements of the arrays or, where those lie
  /// apart, of the bucket, between its moves. All elements where it is cut by shares.
  CudaPiece stretch(size_t index);

 private:
  const StepArrays* arrays_ = nullptr;
  size_t count_ = 0;  // elements, of all pieces
  StepShape step_{};
  CudaPiece common_{};  // to all pieces
  void add_updates();
  void add_norms();

  StepPiece moves_;
  std::vector<CudaUpdate> updates_;
  std::vector<CudaNormStretch> norms_;
  uint64_t terms_ = 0;  // of the pieces so far
  CudaPiece piece_{};
};

}  // namespace farandole
