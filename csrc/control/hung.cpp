#include "control/hung.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace farandole {

std::vector<int> stopped_among(const Host& host, const std::vector<int>& world_ranks) {
  std::vector<int> stopped;
  std::ranges::copy_if(world_ranks, std::back_inserter(stopped),
                       [&](int r) { return r != host.rank && host.is_stopped(r); });
  return stopped;
}

std::optional<Error> hung_among(const Host& host, const std::vector<int>& world_ranks,
                                const std::string& waited, Context where) {
  const std::vector<int> stopped = stopped_among(host, world_ranks);
  if (stopped.empty()) return std::nullopt;
  where = host.about(stopped.front(), std::move(where));
  where.values = {{"missing", stopped}};
  where.evidence.clear();
  for (const int r : stopped)
    where.evidence += (where.evidence.empty() ? "" : "; ") + host.name_of(r) + " is " +
                      host.state_of(r) + (host.is_here(r) ? "" : ", as ranks on its host see");
  return Error(ErrorCode::peer_hung,
               name_ranks(stopped) + (stopped.size() > 1 ? " are" : " is") + " stopped: " + waited,
               std::move(where));
}

}  // namespace farandole
