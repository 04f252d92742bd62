// What schedules over byte channels cost: the numbers from which a planner is chosen.
#pragma once

namespace farandole {

/// In seconds. The defaults are orders of magnitude: good enough to tell latency from bandwidth.
struct ChannelCosts {
  double round = 5e-6;    // a message somebody waits for: a hand-over between polling ranks
  double message = 5e-7;  // a message that is there already
  double byte = 1 / 5e9;  // copied in and out of the channel
  double folded_byte = 1 / 10e9;

  friend bool operator==(const ChannelCosts&, const ChannelCosts&) = default;
};

}  // namespace farandole
