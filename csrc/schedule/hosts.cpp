#include "schedule/hosts.h"

#include <algorithm>

#include "schedule/leaves.h"

namespace farandole {

size_t Hosts::smallest() const {
  const auto size = [](const std::vector<int>& host) { return host.size(); };
  return std::ranges::min_element(ranks, {}, size)->size();
}

int Hosts::largest() const {
  const auto size = [](const std::vector<int>& host) { return host.size(); };
  return static_cast<int>(std::ranges::max_element(ranks, {}, size) - ranks.begin());
}

Hosts hosts_of(const Shape& shape) {
  Hosts hosts;
  std::vector<int> numbers;  // as the shape has them
  for (int r = 0; r < shape.size; ++r) {
    const int number = shape.host_of.empty() ? 0 : shape.host_of[static_cast<size_t>(r)];
    const auto known = std::ranges::find(numbers, number);
    const auto host = static_cast<size_t>(known - numbers.begin());
    if (known == numbers.end()) {
      numbers.push_back(number);
      hosts.ranks.emplace_back();
    }
    hosts.ranks[host].push_back(r);
    hosts.of.push_back(static_cast<int>(host));
  }
  return hosts;
}

bool has_levels(const Shape& shape) {
  if (shape.host_of.empty()) return false;
  const int hosts = hosts_of(shape).count();
  return hosts > 1 && hosts < shape.size;
}

bool are_nodes(const Hosts& hosts) { return partials_of(hosts.of).size() == hosts.ranks.size(); }

}  // namespace farandole
