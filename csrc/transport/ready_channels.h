// A connection whose channels are there at once, as they wait for the peer themselves.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace farandole {

class ReadyChannels : public Connecting {
 public:
  explicit ReadyChannels(std::vector<std::unique_ptr<Channel>> channels)
      : channels_(std::move(channels)) {}
  std::vector<std::unique_ptr<Channel>> poll(TimePoint) override { return std::move(channels_); }

 private:
  std::vector<std::unique_ptr<Channel>> channels_;
};

}  // namespace farandole
