// The signature of an operation submitted by name, which ranks exchange and compare.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "schedule/collective_spec.h"

namespace farandole {

struct TensorSignature {
  DType dtype = DType::float32;
  std::vector<int64_t> shape;
  bool operator==(const TensorSignature&) const = default;
};

/// One operation. A group of tensors that start together is one operation of several tensors.
struct Signature : CollectiveSpec {  // the root: a world rank
  std::string name;                  // names of different kinds and sets do not meet
  uint32_t set = 0;                  // of ranks
  bool lasting = true;               // the name will come again
  std::string device = "cpu";
  std::vector<TensorSignature> tensors;
  std::vector<int64_t> splits;  // all_to_all: rows for each member of the set
  std::string note;             // compared line by line, before all else: what belongs together
  bool operator==(const Signature&) const = default;

  std::string title() const { return std::string(name_of(kind)) + " '" + name + "'"; }
  /// The key by which the ranks' submissions meet.
  std::string key() const {
    return std::to_string(set) + '\x1f' + std::string(name_of(kind)) + '\x1f' + name;
  }
};

inline constexpr size_t kLongestName = 1024;
inline constexpr size_t kMostTensors = 1 << 16;
inline constexpr size_t kMostDimensions = 64;
inline constexpr size_t kLongestNote = 16 << 20;
inline constexpr size_t kLongestDevice = 64;

/// Lengths that a rank decides for itself: the first dimensions of what it gathers, the rows it
/// sends to each member. The others learn them when the operation is ordered.
std::vector<int64_t> extents_of(const Signature& signature);
/// How many, of an operation of this signature in a set of that size.
size_t extents_count(const Signature& signature, size_t members);

/// Accept what `check` of named/request.h accepts, for data from another rank. Throw Malformed.
void check_signature(const Signature& signature, const std::vector<int>& members);
/// `member`: this rank, in the set; `own`: its extents, all 0 if there are none (a stand-in's).
void check_extents(const Signature& signature, size_t members, std::span<const int64_t> extents,
                   int member, std::span<const int64_t> own);

/// Why the members' signatures cannot be one operation, in the same words for everybody; nothing
/// when they can. A null entry: that member has joined, and takes what the others say.
std::optional<Error> disagreement(std::span<const Signature* const> by_member,
                                  const std::vector<int>& members);

}  // namespace farandole
