// Facts of an operation on which ranks agree: compared by hash, shown in full if they disagree.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stream/operation.h"

namespace farandole {

/// The facts on which all ranks must agree, fixed in size so that they can be shared.
struct Descriptor {
  CollectiveSpec spec;
  DType dtype;
  Determinism level;
  uint8_t on_devices;  // 1: they may stay there; 2: they go by the host
  uint64_t count;
  uint64_t piece;      // of an operation that goes by the host in pieces; 0: as a whole
  uint64_t arrays;     // of the call; those of a bundle stand at:
  uint64_t arrays_at;  // offset in the segment; 0: nowhere
  char algorithm[32];
  char name[192];
  char counts[96];  // cut ones tell themselves apart by their hash

  /// How many arrays are shown with it.
  uint64_t bundled() const { return arrays == 1 ? 0 : arrays; }
};
Descriptor describe(const Operation& operation);
/// A hash of the same facts; never 0.
uint32_t hash_of(const Operation& operation);

/// The description that a member shows when ranks disagree.
struct Shown {
  Descriptor descriptor;
  std::vector<BundledArray> arrays;  // of its bundle
};

/// Why members that started different operations disagree, in the same words on each of them and
/// by world rank; nothing when they do not.
std::optional<Error> disagreement(const std::vector<Shown>& by_member,
                                  const std::vector<int>& members);
/// Whether they have arrays on devices, all or none of them, and may all keep them there or not:
/// the one difference that refuses nothing.
bool lie_alike(const std::vector<Shown>& by_member);
/// Elements of a piece (Cut) if any rank goes by the host in pieces, and all can; 0: as a whole.
size_t common_piece(const std::vector<Shown>& by_member);

}  // namespace farandole
