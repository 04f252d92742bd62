// The hosts of a shape, and the ranks on each.
#pragma once

#include <cstddef>
#include <vector>

#include "schedule/schedule.h"

namespace farandole {

struct Hosts {
  std::vector<std::vector<int>> ranks;  // by host, in the order of their lowest ranks
  std::vector<int> of;                  // by rank

  int count() const { return static_cast<int>(ranks.size()); }
  size_t smallest() const;  // ranks of the host with fewest
  int largest() const;      // the first host with most
};

Hosts hosts_of(const Shape& shape);

/// Whether ranks are on several hosts and some of them share one.
bool has_levels(const Shape& shape);

/// Whether each host's ranks are one node of the canonical tree.
bool are_nodes(const Hosts& hosts);

}  // namespace farandole
