// The meaning of a collective, element by element: each rank's input, and its expected output.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace farandole {

/// Where an element comes from: one of a leaf's contribution. Leaves are numbered through all
/// ranks; where nothing is folded, every rank is one.
struct Origin {
  uint32_t leaf = 0;
  uint32_t element = 0;
};

/// How much a rank reads and is left with, in elements, and where both begin in their one memory
/// when they are in place.
struct Extents {
  size_t input = 0, output = 0;
  size_t input_base = 0, output_base = 0;
};

class Expectation {
 public:
  /// Throws Error(invalid_argument) for a shape that makes no sense. Keeps `world`'s spans.
  Expectation(Collective collective, const Shape& world);

  Extents extents(int rank) const;

  /// The contents of a rank's input; empty where it is not read.
  std::vector<Origin> input(int rank) const;

  /// The contents its output should have. In a fold only `element` counts: all leaves are in it.
  std::vector<Origin> output(int rank) const;

 private:
  Shape of(int rank) const;

  Collective collective_;
  Shape world_;
};

}  // namespace farandole
