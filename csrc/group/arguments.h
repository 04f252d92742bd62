// The arguments of a collective, and the checks that a rank makes by itself before it sends.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stream/operation.h"

namespace farandole {

/// A collective, and what it takes besides its buffers.
struct Options : CollectiveSpec {
  Options() = default;
  Options(const CollectiveSpec& what) : CollectiveSpec(what) {}

  std::vector<size_t> counts;  // uneven forms: the same on every rank
  std::string name;
  std::string algorithm;
  std::shared_ptr<Bundle> bundle;  // of a call that becomes several operations: all have it
  std::shared_ptr<Epilogue> epilogue;
  std::shared_ptr<Gate> gate;
  std::shared_ptr<OnDevices> on_devices;
  std::optional<Determinism> level;  // default: the group's
  std::optional<Deadline> deadline;  // default: the group's timeout from now
  std::shared_ptr<const void> keepalive;
  Completion completion;
};

/// The shape of a collective of these arguments, on rank `rank` of `size`; it refers to the
/// options' counts. Throws Error(invalid_argument) when they make no sense together.
Shape checked_shape(const Buffer& input, const Buffer& output, const Options& options, int rank,
                    int size);

}  // namespace farandole
