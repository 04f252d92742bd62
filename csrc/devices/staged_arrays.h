// Where the arrays of an operation lie, of which some are on devices, and where they lie on the
// host once they are staged: what has to be brought is copied there, and results are copied back.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "devices/staged_copies.h"
#include "group/group.h"
#include "group/pack.h"

namespace farandole {

/// An array: on a device if `device` says so, and then `buffer` has its address there.
struct PlacedArray {
  Buffer buffer;
  std::optional<DeviceSpan> device;
};

/// Throws Error(invalid_argument) where its owner's stream is being captured. `what`: begins the
/// sentence.
void refuse_graph(const PlacedArray& array, std::string_view what);

/// One array of a call: what goes in and what comes out.
struct PlacedOperand {
  PlacedArray input, output;

  Operand buffers() const { return {input.buffer, output.buffer}; }
};

/// The stream of all arrays of a call, where it is being captured into a CUDA graph; nothing where
/// none is. Throws Error(invalid_argument) where it is not one for all.
std::optional<uint64_t> graph_of(const std::vector<PlacedOperand>& arrays);

/// The copies that one operation's arrays need.
struct StagedEnds {
  bool brings = false;      // the input, to the host
  bool takes_back = false;  // the result, to its device
  bool shares = false;      // on the host the result overwrites the input

  StagedEnds(const CollectiveSpec& spec, const PlacedArray& input, const PlacedArray& output,
             int rank);
  /// The operand on the host: `brought` and `taken_back` hold the copies.
  Operand lie(const PlacedArray& input, const PlacedArray& output, std::byte* brought,
              std::byte* taken_back) const;
};

/// Where the arrays of one operation lie on the host, and the copies of what has to be brought.
Operand stage(StagedCopies& copies, const Options& options, const PlacedArray& input,
              const PlacedArray& output, int rank);

/// A call's copies: the gate of its operations, and what keeps its arrays.
std::shared_ptr<StagedCopies> copies_for(Group& group, Options& options);

/// As stage(), for all arrays of an operation, with their copies sealed.
struct StagedArrays {
  Operand whole;
  std::shared_ptr<Pack> pack;  // of more than one
};
StagedArrays stage_all(StagedCopies& copies, const Options& options,
                       const std::vector<PlacedOperand>& arrays, int rank, int size,
                       BufferPool& pool);

/// Returns what `act` returns. An error of a device on this rank reaches all ranks.
template <typename Act>
auto or_fail_group(Group& group, const Act& act) {
  try {
    return act();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument || error.code() == ErrorCode::forked) throw;
    group.fail(on_rank(error, group.engine()->host().rank));
  }
}

}  // namespace farandole
