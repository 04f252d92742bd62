// Collectives among ranks that read each other's memory: no messages, each takes what it needs.
//
// One table says which part of another's input a rank takes, and where that stands in its output. A
// collective that folds folds these parts of all ranks. Every path over shared memory follows it.
#pragma once

#include "schedule/schedule.h"

namespace farandole {

/// The data that one rank takes of another's input. `put` is as long as `take`.
struct Route {
  Slice take{Space::input};
  Slice put{Space::output};
};

/// The data that `to` takes of the input of `from`, which may be itself. Empty if it takes none.
Route route(Collective kind, const Shape& shape, int from, int to);

/// Whether other ranks take anything of `rank`'s input.
constexpr bool is_read(Collective kind, const Shape& shape, int rank) {
  switch (kind) {
    case Collective::broadcast:
    case Collective::scatter:
    case Collective::send:
    case Collective::recv:
      return rank == shape.root;
    case Collective::reduce:
    case Collective::gather:
      return rank != shape.root;
    default:
      return kind != Collective::barrier;
  }
}

/// Whether `rank` takes anything of other ranks' inputs.
constexpr bool is_reader(Collective kind, const Shape& shape, int rank) {
  switch (kind) {
    case Collective::broadcast:
    case Collective::scatter:
    case Collective::send:
    case Collective::recv:
      return rank != shape.root;
    case Collective::reduce:
    case Collective::gather:
      return rank == shape.root;
    default:
      return kind != Collective::barrier;
  }
}

/// Whether ranks take of those that take of them; else all goes from one rank, or to it.
constexpr bool goes_both_ways(Collective kind, const Shape& shape) {
  return is_read(kind, shape, 0) && is_reader(kind, shape, 0);
}

/// Elements of one rank's input.
size_t input_count(Collective kind, const Shape& shape, int rank);
/// Elements of the longest input: what decides, equally on all ranks, how a collective goes.
size_t longest_input(Collective kind, const Shape& shape);
/// Elements of the longest route.
size_t longest_route(Collective kind, const Shape& shape);

}  // namespace farandole
