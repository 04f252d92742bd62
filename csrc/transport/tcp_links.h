// The bytes that move on TCP connections, as the kernel counts them. They show whether a host still
// answers, even if its ranks send no message, or their messages are stuck behind data.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

namespace farandole {

struct TcpTraffic {
  uint64_t acknowledged = 0, received = 0;  // bytes, since it was connected
  /// All bytes sent have been acknowledged, and the other end answers even if it takes no more.
  bool settled = false;
};
TcpTraffic traffic_on(int socket);

/// A rank's connections for data, by the rank at the other end. Any thread.
class TcpLinks {
 public:
  void add(int socket, int peer);
  /// Before it is closed.
  void remove(int socket);
  /// Sums over the connections with `peer`. Other numbers than before: something has moved
  /// meanwhile, to it or from it.
  TcpTraffic traffic_with(int peer) const;

 private:
  mutable std::mutex mutex_;  // guards the map
  std::map<int, int> peers_;  // by socket
};

}  // namespace farandole
