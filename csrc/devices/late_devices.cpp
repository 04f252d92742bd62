#include "devices/late_devices.h"

#include <utility>
#include <vector>

#include "base/seconds_text.h"
#include "control/hung.h"
#include "control/wait_watch.h"

namespace farandole {
namespace {

/// How long a device may take to give the same answer twice. If this one does not answer, others
/// report it meanwhile.
constexpr auto kPatience = std::chrono::seconds(2);
constexpr char kAdvice[] =
    "look what the streams of those devices wait for, or allow more time by timeout= or "
    "FARANDOLE_TIMEOUT";

std::string unfinished(const LateStep& step) { return step.title + " was not complete"; }

/// Empty: the ranks' flags say who is late.
std::string why_unknown(const LateStep& step) {
  if (!step.held_up) return "collectives in CUDA graphs do not tell which rank is late";
  return step.held_up == DeviceWay::nccl ? "NCCL does not tell which rank is late" : "";
}

}  // namespace

LateDevices::LateDevices(const EngineView& around, const Membership& membership,
                         std::shared_ptr<DeviceExchange> exchange)
    : around_(around), membership_(membership), exchange_(std::move(exchange)) {}

std::optional<Error> LateDevices::look(const LateStep& step, TimePoint when) {
  if (const std::string why = why_unknown(step); !why.empty()) return blame_nobody(step, why);
  if (asked_ == TimePoint{}) {
    asked_ = when;
    seen_.reset();
  }
  const auto found = exchange_->look_for_late();
  if (found && std::exchange(seen_, *found) == *found) {
    if (*found != 0) return blame(step, *found);
    // All ranks have come, so the rest is this rank's own work. Lanes still wait for each other.
    if (step.held_up != DeviceWay::lanes) return blame(step, uint64_t{1} << membership_.rank);
    return blame_nobody(step, "the devices of all ranks have begun it");
  }
  if (when - asked_ < kPatience) return std::nullopt;
  return blame_nobody(step, seen_ ? "the devices are still at it" : "the device does not answer");
}

/// `places`: one bit for each member.
Error LateDevices::blame(const LateStep& step, uint64_t places) const {
  Context where;
  where.operation = step.title;
  std::vector<int> late;
  for (size_t place = 0; place < membership_.members.size(); ++place) {
    if ((places >> place & 1) == 0) continue;
    late.push_back(membership_.members[place]);
  }
  const std::string waited = unfinished(step) + " after " + seconds_text(step.waited);
  if (auto hung = hung_among(*around_.host, late, waited, where)) return *hung;
  for (const int r : late)
    where.evidence += (where.evidence.empty() ? "" : "; ") + around_.host->name_of(r) + " is " +
                      around_.host->state_of(r) + around_.waits->doing(r, " and ");
  where.rank = late.front();
  where.values = {{"missing", late}};
  return {ErrorCode::stalled,
          waited + "; not reached by the " + (late.size() > 1 ? "devices" : "device") + " of " +
              name_ranks(late),
          std::move(where), kAdvice};
}

Error LateDevices::blame_nobody(const LateStep& step, const std::string& why) const {
  Context where;
  where.operation = step.title;
  where.evidence = why;
  return {ErrorCode::stalled,
          unfinished(step) + " on device " + std::to_string(exchange_->ordinal()) + " of " +
              name_ranks({around_.host->rank}) + " after " + seconds_text(step.waited),
          std::move(where), "look what the streams of all ranks' devices wait for"};
}

}  // namespace farandole
