#include "backends/algorithm_names.h"

#include <algorithm>
#include <string>

#include "backends/eager.h"
#include "backends/mpi_all_reduce.h"
#include "backends/paths.h"
#include "backends/schedule_backend.h"
#include "base/error.h"
#include "base/spelling.h"
#include "schedule/schedule.h"

namespace farandole {

std::vector<std::string_view> algorithm_names() {
  std::vector<std::string_view> names;
  for (const PathRow* row : path_table()) names.push_back(row->name);
  names.push_back(ScheduleBackend::kName);
  names.push_back(EagerBackend::kName);
  names.push_back(MpiAllReduce::kName);
  for (const Planner& planner : planners())
    if (std::ranges::find(names, planner.name) == names.end()) names.push_back(planner.name);
  return names;
}

void require_algorithm_name(std::string_view setting, std::string_view name) {
  const std::vector<std::string_view> names = algorithm_names();
  if (std::ranges::find(names, name) != names.end()) return;
  throw Error(ErrorCode::invalid_argument,
              std::string(setting) + "=" + std::string(name) + " is not an algorithm" +
                  did_you_mean(name, names),
              {}, "one of: " + join_names(names));
}

}  // namespace farandole
