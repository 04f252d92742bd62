// Selects the path of a collective on arrays of devices, by predicted cost as for the host's paths.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "cuda/plans.h"
#include "schedule/collective_spec.h"
#include "schedule/schedule.h"

namespace farandole {

enum class DeviceWay : uint8_t { staged, step, spin, lanes, nccl };

/// The choice of the caller: a path, by a call's `algorithm` or FARANDOLE_DEVICE_PATH, and a
/// planner, by the algorithm. Devices run the planner's schedule, or the host does.
struct DeviceAsked {
  std::string_view way = "auto", planner = "";
};
DeviceAsked device_asked(std::string_view algorithm, std::string_view setting);

/// The same on all ranks, all of which have their arrays on devices.
struct DeviceQuestion {
  CollectiveSpec spec{.kind = Collective::all_reduce};
  DType dtype = DType::float32;
  Determinism level = Determinism::canonical;
  size_t bytes = 0;  // of the longer of input and output
  int ranks = 1;
  std::string_view no_buckets = "";  // why devices cannot fold each other's buckets
  std::string_view no_nccl = "";     // why there is no communicator; empty also while nobody knows
  bool switched = false;             // a switch joins all ranks' devices, and folds for NCCL
  size_t spin_bytes = 0;    // that a kernel which waits for others can take; 0: there is none
  Shape shape{};            // as schedules are for; its counts live as long
  cuda::LaneRoom lanes{};   // no lanes: there is no such kernel for schedules
  size_t staged_piece = 0;  // bytes of those in which a long array goes by the host; 0: as a whole
  bool take_turns = false;  // ranks that share a device run there by slices of its time
  bool apart = false;       // it is of several arrays that travel as one
  DeviceAsked asked{};      // whose words live as long
};

/// The question as far as these arguments determine it.
DeviceQuestion question_of(const CollectiveSpec& spec, DType dtype, Determinism level,
                           const Shape& shape, const DeviceAsked& asked);

struct DevicePath {
  DeviceWay way;
  std::string_view name;
  std::string_view words;                             // what it does
  double (*seconds)(const DeviceQuestion& question);  // predicted
};

/// All paths, indexed by DeviceWay.
std::span<const DevicePath> device_paths();
std::optional<DeviceWay> device_way_named(std::string_view name);
std::string_view name_of(DeviceWay way);

/// Why a path is not considered; empty: it is.
std::string why_not(const DevicePath& path, const DeviceQuestion& question);
/// The path with the least predicted time, or the one that is asked for, where it can run.
DeviceWay choose_device_way(const DeviceQuestion& question);

/// Why the level forbids this path's own order of folds. Empty if it allows it, if the path has
/// none, or if nothing is folded.
std::string why_not_of_level(DeviceWay way, Collective kind, Determinism level);

/// The planner whose schedule lanes run: the one that is asked for, or the fastest. Null if the
/// former does not exist, or the level forbids it.
const Planner* lanes_planner(const DeviceQuestion& question);
/// The shape with its numbers of lanes and segments.
Shape lanes_shape(Collective kind, Shape shape, size_t element, const cuda::LaneRoom& room);

/// Each path with its words for this question.
struct DeviceCandidate {
  std::string name;
  double seconds = 0;
  std::string words;    // what it does
  std::string refusal;  // why it is not considered; empty: it is
  bool chosen = false;
};
std::vector<DeviceCandidate> explain_devices(const DeviceQuestion& question);

}  // namespace farandole
