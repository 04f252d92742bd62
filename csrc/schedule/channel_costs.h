// The costs of schedules over byte channels: the numbers from which a planner is chosen.
#pragma once

#include <cstddef>

namespace farandole {

/// In seconds. The defaults are orders of magnitude: good enough to tell latency from bandwidth.
struct ChannelCosts {
  double round = 5e-6;    // a message that a rank waits for: a hand-over between polling ranks
  double message = 5e-7;  // a message that is there already
  double byte = 1 / 5e9;  // copied in and out of the channel
  double folded_byte = 1 / 10e9;
  // With several hosts: between ranks that share one. `byte` is then the time of a host's link.
  double inner_round = 5e-6;
  double inner_byte = 1 / 5e9;
  int lanes = 2;  // that large data are spread over: a second one fills the waits of the first,
  size_t second_lane = 512 * 1024;  // where those are longer than its extra steps take

  friend bool operator==(const ChannelCosts&, const ChannelCosts&) = default;
};

/// Between hosts, and of data over TCP on one host, where a table has been measured over shared
/// memory. Orders of magnitude: a word each way over bare sockets takes 6 us, 1 MiB each way 640.
inline constexpr ChannelCosts kTcpCosts{
    .round = 8e-6, .message = 3e-6, .byte = 1 / 1.8e9, .folded_byte = 1 / 10e9, .lanes = 1};

/// An MPI's network is taken for TCP's. A second lane fills the waits of the first, where that does
/// not make messages short.
constexpr ChannelCosts over_mpi(ChannelCosts costs) {
  costs.lanes = 2;
  costs.second_lane = 2 * 1024 * 1024;
  return costs;
}

}  // namespace farandole
