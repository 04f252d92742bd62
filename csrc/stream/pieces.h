// An operation on the host that runs in pieces, one after the other: each is an operation of its
// stream, with a number of its own. All ranks cut it alike.
#pragma once

#include <memory>

#include "schedule/cut.h"
#include "stream/operation.h"

namespace farandole {

/// By the thread that polls.
class Pieces {
 public:
  /// `lie`: null where the buffers are memory of this process, and pieces of them lie together.
  /// `whole` outlives it.
  Pieces(const Operation& whole, Cut cut, std::shared_ptr<PiecesOnDevices> lie);

  /// The piece that runs. Its address never changes.
  const Operation& piece() const { return piece_; }
  bool is_first() const { return index_ == 0; }
  /// Replaces the piece, which has run, by the next one. False where there is none.
  bool next();

 private:
  void begin();

  const Operation& whole_;
  Cut cut_;
  std::shared_ptr<PiecesOnDevices> lie_;
  size_t index_ = 0;  // of the piece that runs
  Operation piece_;
};

}  // namespace farandole
