// The data that a schedule sends between hosts.
#pragma once

#include <cstddef>

#include "schedule/schedule.h"

namespace farandole {

/// Elements that go into or out of one host, whichever are more: of the host with most ranks or of
/// the root's, whichever has more. All on one host: none.
size_t link_traffic(const Planner& planner, Shape shape);

}  // namespace farandole
