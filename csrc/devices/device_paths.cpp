#include "devices/device_paths.h"

#include <algorithm>
#include <array>

#include "devices/nccl_plan.h"
#include "devices/nvls_plan.h"
#include "devices/step_plan.h"

namespace farandole {
namespace {

// By reasoning, from what devices and links of 2020 to 2025 are said to do; none of them was
// measured. Seconds, and bytes per second.
constexpr double kCall = 2e-6;     // of the driver
constexpr double kMeeting = 3e-6;  // of ranks, by flags
constexpr double kHop = 1e-6;      // from one rank to the next, within a kernel
constexpr double kHostRoundTrip =
    3e-5;                           // two copies' latencies, a doorbell, and a thread that wakes
constexpr double kLink = 2.5e10;    // to the host and back, for all ranks together
constexpr double kHostFold = 1e10;  // likewise
constexpr double kDevice = 1e12;    // of a device's memory, read or written
constexpr double kPeers = 1e11;     // of one device into another

/// How many ranks have the longer of input and output, counted for each of the two.
int ends_of(const DeviceQuestion& q) {
  switch (q.spec.kind) {
    case Collective::gather:
    case Collective::scatter:  // the root, and all others together
      return 2;
    case Collective::reduce:
    case Collective::broadcast:
      return q.ranks + 1;
    default:
      return 2 * q.ranks;
  }
}

double staged_seconds(const DeviceQuestion& q) {
  const auto bytes = static_cast<double>(q.bytes) * ends_of(q);
  return kHostRoundTrip + bytes / kLink + bytes / 2 / kHostFold;
}

double step_seconds(const DeviceQuestion& q) {
  const auto bytes = static_cast<double>(q.bytes);
  return (12 + 2 * (q.ranks - 1)) * kCall + 2 * kMeeting + 4 * bytes / kDevice + 2 * bytes / kPeers;
}

double spin_seconds(const DeviceQuestion& q) {
  const auto bytes = static_cast<double>(q.bytes) * q.ranks;
  return 5 * kCall + kMeeting + bytes / kPeers;
}

/// How often the data cross a link where a switch folds: a device sends its input, and its part of
/// the result once for all.
double crossings_by_switch(const DeviceQuestion& q) { return 1 + 1.0 / q.ranks; }

/// Its kernel is launched once, and its ranks hand on to each other. Where a switch folds, NCCL
/// lets it, too, among more than two ranks (as its sources say).
double nccl_seconds(const DeviceQuestion& q) {
  const bool by_switch = q.spec.kind == Collective::all_reduce && q.ranks > 2 &&
                         q.no_nvls.empty() && q.no_buckets.empty();
  const double crossings = by_switch ? crossings_by_switch(q) : 2;
  return 5 * kCall + kMeeting + (q.ranks - 1) * kHop +
         crossings * static_cast<double>(q.bytes) / kPeers;
}

/// The steps' copies and meetings.
double nvls_seconds(const DeviceQuestion& q) {
  const auto bytes = static_cast<double>(q.bytes);
  return (12 + 2 * (q.ranks - 1)) * kCall + 2 * kMeeting + 4 * bytes / kDevice +
         crossings_by_switch(q) * bytes / kPeers;
}

constexpr std::array kPaths{
    DevicePath{DeviceWay::staged, "staged", "to the host's memory, reduced there, and back",
               staged_seconds},
    DevicePath{DeviceWay::step, "step",
               "in the devices' streams, from bucket to bucket; no two kernels at once",
               step_seconds},
    DevicePath{DeviceWay::spin, "spin", "one kernel on each rank, which waits for the others'",
               spin_seconds},
    DevicePath{DeviceWay::nccl, "nccl", "by NCCL, in an order of folds of its own", nccl_seconds},
    DevicePath{DeviceWay::nvls, "nvls", "as step, folded by the switch in an order of its own",
               nvls_seconds}};

/// Whether `setting` names a path that can run this.
std::optional<DeviceWay> forced(const DeviceQuestion& q) {
  const auto named = device_way_named(q.setting);
  if (!named) return std::nullopt;
  const auto runs = [&](DeviceWay way) {
    return why_not(kPaths.at(static_cast<size_t>(way)), q).empty();
  };
  if (runs(*named)) return named;
  // Steps are what comes next to whatever else stays on the devices.
  return runs(DeviceWay::step) ? DeviceWay::step : DeviceWay::staged;
}

std::string why_not_nccl(const DeviceQuestion& q) {
  if (!q.no_nccl.empty()) return std::string(q.no_nccl);
  const Collective kind = q.spec.kind;
  if (std::string why = why_not_of_level(DeviceWay::nccl, kind, q.level); !why.empty()) return why;
  if (folds(kind)) {
    if (std::string why = why_not_by_nccl(q.spec, q.dtype); !why.empty()) return why;
  }
  if (q.level == Determinism::canonical && q.setting != "nccl")
    return "is taken at level 'fast', or by name";
  return "";
}

std::string why_not_nvls(const DeviceQuestion& q) {
  if (std::string why = why_not_by_nvls(q.spec, q.dtype); !why.empty()) return why;
  if (std::string why = why_not_of_level(DeviceWay::nvls, q.spec.kind, q.level); !why.empty())
    return why;
  if (q.ranks == 1) return "takes two ranks at least";
  return std::string(q.no_nvls);
}

std::string why_not_spin(const DeviceQuestion& q) {
  if (q.spec.kind != Collective::all_reduce) return "runs all_reduce alone";
  if (q.spin_bytes == 0)
    return "ranks share a device, or are too many: their kernels may not run at once";
  if (q.bytes > q.spin_bytes)
    return "takes " + std::to_string(q.spin_bytes) + " bytes at most here";
  return "";
}

}  // namespace

DeviceQuestion question_of(const CollectiveSpec& spec, DType dtype, Determinism level,
                           const Shape& shape, std::string_view setting) {
  return {.spec = spec,
          .dtype = dtype,
          .level = level,
          .bytes = amount_of(spec.kind, shape) * size_of(dtype),
          .ranks = shape.size,
          .setting = setting};
}

std::span<const DevicePath> device_paths() { return kPaths; }

std::optional<DeviceWay> device_way_named(std::string_view name) {
  const auto found = std::ranges::find(kPaths, name, &DevicePath::name);
  return found == kPaths.end() ? std::nullopt : std::optional(found->way);
}

std::string_view name_of(DeviceWay way) { return kPaths.at(static_cast<size_t>(way)).name; }

std::string why_not_of_level(DeviceWay way, Collective kind, Determinism level) {
  if (level == Determinism::fast || !folds(kind)) return "";
  if (way != DeviceWay::nccl && way != DeviceWay::nvls) return "";
  return std::string(way == DeviceWay::nccl ? "NCCL" : "the switch") +
         " folds in an order of its own, and level 'canonical' promises bits";
}

std::string why_not(const DevicePath& path, const DeviceQuestion& q) {
  if (path.way == DeviceWay::staged) return "";
  if (!has_steps(q.spec.kind)) return std::string(name_of(q.spec.kind)) + " goes by the host alone";
  if (path.way == DeviceWay::nccl) return why_not_nccl(q);
  if (!q.no_buckets.empty()) return std::string(q.no_buckets);
  if (path.way == DeviceWay::nvls) return why_not_nvls(q);
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
