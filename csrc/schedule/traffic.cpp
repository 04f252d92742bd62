#include "schedule/traffic.h"

#include <algorithm>

#include "schedule/hosts.h"

namespace farandole {
namespace {

size_t traffic_of(const Planner& planner, Shape shape, const Hosts& hosts, int host) {
  const auto is_elsewhere = [&](int rank) {
    return rank != kNobody && hosts.of[static_cast<size_t>(rank)] != host;
  };
  size_t out = 0, into = 0;
  for (const int rank : hosts.ranks[static_cast<size_t>(host)]) {
    shape.rank = rank;
    for (const Lane& lane : planner.plan(shape).lanes)
      for (const Step& step : lane) {
        if (is_elsewhere(step.to)) out += step.send.count;
        if (is_elsewhere(step.from)) into += step.recv.count;
      }
  }
  return std::max(out, into);
}

}  // namespace

size_t link_traffic(const Planner& planner, Shape shape) {
  const Hosts hosts = hosts_of(shape);
  if (hosts.count() == 1) return 0;
  shape.lanes = shape.segments = 1;  // cut or not, it is as much
  const int largest = hosts.largest(), root = hosts.of[static_cast<size_t>(shape.root)];
  const size_t traffic = traffic_of(planner, shape, hosts, largest);
  return largest == root ? traffic : std::max(traffic, traffic_of(planner, shape, hosts, root));
}

}  // namespace farandole
