// An operation on the host that runs in pieces, one after the other: each is an operation of its
// stream, with a number of its own. All ranks cut it alike.
#pragma once

#include <memory>

#include "stream/operation.h"

namespace farandole {

/// Whether an element of the result follows from the inputs' elements of the same place alone, so
/// that cutting changes no bits.
constexpr bool can_be_cut(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::broadcast ||
         kind == Collective::reduce;
}

/// By the thread that polls.
class Pieces {
 public:
  /// `elements`: of a piece. `lie`: null where the buffers are memory of this process. `whole`
  /// outlives it.
  Pieces(const Operation& whole, size_t elements, std::shared_ptr<PiecesOnDevices> lie);

  /// The one that runs. Its address stays.
  const Operation& piece() const { return piece_; }
  bool is_first() const { return first_ == 0; }
  size_t size() const { return (whole_.count + elements_ - 1) / elements_; }
  /// It has run: the next one takes its place. False where there is none.
  bool next();

 private:
  void begin();

  const Operation& whole_;
  size_t elements_;
  std::shared_ptr<PiecesOnDevices> lie_;
  size_t first_ = 0;  // element of the piece that runs
  Operation piece_;
};

}  // namespace farandole
