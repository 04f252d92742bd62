// Ranks that are stopped, and so hold up what others wait in.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "control/host.h"

namespace farandole {

/// Waiting ranks look so long for stopped ones before they warn of them: a wait is rarely as long.
constexpr Duration kUntilStopsCount = std::chrono::seconds(2);

/// Those of the ranks that are stopped.
std::vector<int> stopped_among(const Host& host, const std::vector<int>& world_ranks);

/// The error that blames the stopped ranks alone; nothing if there are none. Any other rank may be
/// late because of them. `waited`: "all_reduce #2 was not complete after 3 s".
std::optional<Error> hung_among(const Host& host, const std::vector<int>& world_ranks,
                                const std::string& waited, Context where);

}  // namespace farandole
