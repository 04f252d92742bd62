#include "devices/device_paths.h"

#include <algorithm>
#include <array>

#include "devices/nccl_plan.h"
#include "devices/step_plan.h"
#include "schedule/cut.h"
#include "schedule/planners.h"

namespace farandole {
namespace {

// Estimates from the published figures of devices and links of 2020 to 2025, not measured. Seconds,
// and bytes per second.
constexpr double kCall = 2e-6;     // of the driver
constexpr double kMeeting = 3e-6;  // of ranks, by flags
constexpr double kSlice = 2.4e-3;  // of a device's time, before another process has it (an H200)
constexpr double kHop = 1e-6;      // from one rank to the next, within a kernel
constexpr double kHostRoundTrip =
    3e-5;                            // two copies' latencies, a doorbell, and a thread that wakes
constexpr double kLink = 2.5e10;     // to the host, and likewise back, for all ranks together
constexpr double kHostFold = 1e10;   // for all ranks together
constexpr double kDevice = 1e12;     // of a device's memory, read or written
constexpr double kPeers = 1e11;      // of one device into another
constexpr double kLane = 5e9;        // by one block, in slots
constexpr double kPassesOfLane = 4;  // through a device's memory: out of it, into a slot, out, in

/// How often the longer of input and output goes to the host, and how often it comes back.
struct Ends {
  int in, out;
};
Ends ends_of(const DeviceQuestion& q) {
  switch (q.spec.kind) {
    case Collective::gather:
    case Collective::scatter:  // the root, and all others together
      return {1, 1};
    case Collective::reduce:
      return {q.ranks, 1};
    case Collective::broadcast:
      return {1, q.ranks};
    default:
      return {q.ranks, q.ranks};
  }
}

/// The number of pieces (StagedPieces).
size_t staged_pieces_of(const DeviceQuestion& q) {
  const bool whole = q.staged_piece == 0 || q.apart || !q.asked.planner.empty() ||
                     !can_be_cut(q.spec.kind) || q.bytes == 0;
  return whole ? 1 : (q.bytes + q.staged_piece - 1) / q.staged_piece;
}

/// Pieces overlap: the slowest of copy in, fold and copy out hides the rest, but for one piece.
double staged_seconds(const DeviceQuestion& q) {
  const auto bytes = static_cast<double>(q.bytes);
  const Ends ends = ends_of(q);
  const double in = bytes * ends.in / kLink, out = bytes * ends.out / kLink,
               folds = bytes * (ends.in + ends.out) / 2 / kHostFold;
  const double longest = std::max({in, folds, out});
  return kHostRoundTrip + longest +
         (in + folds + out - longest) / static_cast<double>(staged_pieces_of(q));
}

/// The least that each rank sends, and receives, in an all-reduce: twice all parts but its own.
double sent_bytes(const DeviceQuestion& q) {
  return 2 * static_cast<double>(q.bytes) * (q.ranks - 1) / q.ranks;
}

double step_seconds(const DeviceQuestion& q) {
  const auto bytes = static_cast<double>(q.bytes);
  const double meeting = q.take_turns ? (q.ranks - 1) * kSlice : kMeeting;
  return (12 + 2 * (q.ranks - 1)) * kCall + 2 * meeting + 4 * bytes / kDevice +
         sent_bytes(q) / kPeers;
}

double spin_seconds(const DeviceQuestion& q) {
  const auto bytes = static_cast<double>(q.bytes) * q.ranks;
  return 5 * kCall + kMeeting + bytes / kPeers;
}

/// One kernel launch, in which ranks pass data along, and a pass of ours over results with a
/// factor. With more than two ranks NCCL lets a switch fold (according to its sources), but not
/// where it scales inputs: a device sends its input, and its part of the result once for all.
double nccl_seconds(const DeviceQuestion& q) {
  const bool by_switch = q.spec.kind == Collective::all_reduce && q.ranks > 2 &&
                         q.spec.prescale == 1 && q.switched && q.no_buckets.empty();
  const bool finishes = q.spec.op == ReduceOp::mean || q.spec.postscale != 1;
  const double sent =
      by_switch ? (1 + 1.0 / q.ranks) * static_cast<double>(q.bytes) : sent_bytes(q);
  return 5 * kCall + kMeeting + (q.ranks - 1) * kHop + sent / kPeers +
         (finishes ? kCall + 2 * static_cast<double>(q.bytes) / kDevice : 0);
}

/// A message in a slot is there after one hop, and is heard of after another.
ChannelCosts lane_costs(int lanes) {
  return {.round = 2 * kHop,
          .message = kHop,
          .byte = 1 / std::min(kPeers, lanes * kLane) + kPassesOfLane / kDevice,
          .folded_byte = 1 / kDevice};
}

/// A schedule, and its room. Without any, the room of a device with many multiprocessors counts.
struct Lanes {
  explicit Lanes(const DeviceQuestion& q)
      : room(q.lanes.lanes > 0 ? q.lanes : cuda::LaneRoom{.lanes = 32, .piece_bytes = 1 << 23}),
        shape(lanes_shape(q.spec.kind, q.shape, size_of(q.dtype), room)),
        costs(lane_costs(shape.lanes)) {
    if (q.asked.planner.empty()) {
      planner = &choose_planner(q.spec.kind, shape, size_of(q.dtype), q.level, costs);
      return;
    }
    const Planner* const named = find_planner(q.spec.kind, q.asked.planner);
    if (named != nullptr && is_allowed(*named, shape, q.level)) planner = named;
  }

  cuda::LaneRoom room;
  Shape shape;
  ChannelCosts costs;
  const Planner* planner = nullptr;
};

/// Pieces of an array begin one after the other.
double lanes_seconds(const DeviceQuestion& q) {
  if (!has_steps(q.spec.kind)) return 0;  // and never looked at
  const Lanes lanes(q);
  if (lanes.planner == nullptr) return 0;  // likewise
  const size_t further = q.bytes / lanes.room.piece_bytes;
  return 5 * kCall + kMeeting + static_cast<double>(further) * (kCall + kMeeting) +
         predicted_seconds(lanes.planner->cost(lanes.shape), size_of(q.dtype), lanes.costs);
}

constexpr std::array kPaths{
    DevicePath{DeviceWay::staged, "staged", "to the host's memory, reduced there, and back",
               staged_seconds},
    DevicePath{DeviceWay::step, "step",
               "in the devices' streams, from bucket to bucket; no two kernels at once",
               step_seconds},
    DevicePath{DeviceWay::spin, "spin", "one kernel on each rank, which waits for the others'",
               spin_seconds},
    DevicePath{DeviceWay::lanes, "lanes",
               "a schedule by one kernel on each rank, as the host runs it", lanes_seconds},
    DevicePath{DeviceWay::nccl, "nccl", "by NCCL, in an order of folds of its own", nccl_seconds}};

/// The path that was asked for, or the nearest one that can run this. Nothing if none was.
std::optional<DeviceWay> forced(const DeviceQuestion& q) {
  const auto named = device_way_named(q.asked.way);
  if (!named) return std::nullopt;
  const auto runs = [&](DeviceWay way) {
    return why_not(kPaths.at(static_cast<size_t>(way)), q).empty();
  };
  if (runs(*named)) return named;
  // Steps are the nearest to any other path that stays on the devices.
  return runs(DeviceWay::step) ? DeviceWay::step : DeviceWay::staged;
}

std::string why_not_nccl(const DeviceQuestion& q) {
  if (!q.no_nccl.empty()) return std::string(q.no_nccl);
  const Collective kind = q.spec.kind;
  if (std::string why = why_not_of_level(DeviceWay::nccl, kind, q.level); !why.empty()) return why;
  if (folds(kind)) {
    if (std::string why = why_not_by_nccl(q.spec, q.dtype); !why.empty()) return why;
  }
  if (q.level == Determinism::canonical && q.asked.way != "nccl")
    return "is taken at level 'fast', or by name";
  return "";
}

std::string why_not_spin(const DeviceQuestion& q) {
  if (q.spec.kind != Collective::all_reduce) return "runs all_reduce alone";
  if (q.spin_bytes == 0)
    return "ranks share a device, or are too many: their kernels may not run at once";
  if (q.bytes > q.spin_bytes)
    return "takes " + std::to_string(q.spin_bytes) + " bytes at most here";
  return "";
}

std::string why_not_lanes(const DeviceQuestion& q) {
  if (q.lanes.lanes == 0) return "ranks share a device: their kernels may not run at once";
  if (q.apart && q.spec.kind != Collective::all_reduce)
    return "takes arrays that travel as one for all_reduce alone";
  // Schedules of shares have more scratch, and are not cut.
  if (const size_t most = q.lanes.piece_bytes / 2;
      !is_cut_by_elements(q.spec.kind) && q.bytes > most)
    return "takes " + std::to_string(most) + " bytes at most here";
  if (lanes_planner(q) == nullptr)
    return "there is no schedule '" + std::string(q.asked.planner) + "' of this level";
  return "";
}

}  // namespace

DeviceAsked device_asked(std::string_view algorithm, std::string_view setting) {
  if (device_way_named(algorithm)) return {algorithm, ""};
  return {setting, algorithm};
}

const Planner* lanes_planner(const DeviceQuestion& q) {
  return has_steps(q.spec.kind) ? Lanes(q).planner : nullptr;
}

Shape lanes_shape(Collective kind, Shape shape, size_t element, const cuda::LaneRoom& room) {
  constexpr size_t kOfLane = 4 * 1024;      // bytes that are worth another block
  constexpr size_t kOfSegment = 64 * 1024;  // and another round
  const size_t bytes = amount_of(kind, shape) * element;
  const auto most = static_cast<size_t>(room.lanes);
  const size_t lanes = std::clamp<size_t>(bytes / kOfLane, 1, most);
  shape.lanes = static_cast<int>(lanes);
  shape.segments =
      static_cast<int>(std::clamp<size_t>(bytes / lanes / kOfSegment, 1, cuda::kMostSegments));
  return shape;
}

DeviceQuestion question_of(const CollectiveSpec& spec, DType dtype, Determinism level,
                           const Shape& shape, const DeviceAsked& asked) {
  return {.spec = spec,
          .dtype = dtype,
          .level = level,
          .bytes = amount_of(spec.kind, shape) * size_of(dtype),
          .ranks = shape.size,
          .shape = shape,
          .asked = asked};
}

std::span<const DevicePath> device_paths() { return kPaths; }

std::optional<DeviceWay> device_way_named(std::string_view name) {
  const auto found = std::ranges::find(kPaths, name, &DevicePath::name);
  return found == kPaths.end() ? std::nullopt : std::optional(found->way);
}

std::string_view name_of(DeviceWay way) { return kPaths.at(static_cast<size_t>(way)).name; }

std::string why_not_of_level(DeviceWay way, Collective kind, Determinism level) {
  if (level == Determinism::fast || !folds(kind)) return "";
  if (way != DeviceWay::nccl) return "";
  return "NCCL folds in an order of its own, and level 'canonical' promises bits";
}

std::string why_not(const DevicePath& path, const DeviceQuestion& q) {
  if (path.way == DeviceWay::staged) return "";
  if (!has_steps(q.spec.kind)) return std::string(name_of(q.spec.kind)) + " goes by the host alone";
  if (path.way != DeviceWay::lanes && !q.asked.planner.empty())
    return "runs no schedule by its name";
  if (path.way == DeviceWay::nccl) return why_not_nccl(q);
  if (!q.no_buckets.empty()) return std::string(q.no_buckets);
  if (path.way == DeviceWay::lanes) return why_not_lanes(q);
  return path.way == DeviceWay::spin ? why_not_spin(q) : "";
}

DeviceWay choose_device_way(const DeviceQuestion& q) {
  if (const auto named = forced(q)) return *named;
  const DevicePath* best = &kPaths.front();
  for (const DevicePath& path : kPaths)
    if (why_not(path, q).empty() && path.seconds(q) < best->seconds(q)) best = &path;
  return best->way;
}

std::vector<DeviceCandidate> explain_devices(const DeviceQuestion& q) {
  const DeviceWay chosen = choose_device_way(q);
  std::vector<DeviceCandidate> all;
  for (const DevicePath& path : kPaths)
    all.push_back({std::string(path.name), path.seconds(q), std::string(path.words),
                   why_not(path, q), path.way == chosen});
  return all;
}

}  // namespace farandole
