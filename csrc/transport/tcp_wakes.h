// The events on its connections that wake a parked rank: exactly those its channels wait for. Bytes
// that nobody wants yet, and a peer that has closed, wake nobody.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/fd.h"

namespace farandole {

/// A connection, as its channel sees it.
struct TcpLink {
  Fd socket;
  uint32_t wants = 0;    // EPOLLIN, EPOLLOUT: what its channel waits for; of the polling thread
  uint32_t watched = 0;  // the events for which epoll watches it
};

class TcpWakes {
 public:
  /// `always`: a descriptor that wakes the rank as well.
  explicit TcpWakes(int always);

  /// An epoll: readable once something that was wanted at watch() has come.
  int fd() const { return epoll_.get(); }
  /// By the thread that polls, before it parks.
  void watch();
  /// Any thread. `link` stays where it is until it is removed, which closes it.
  void add(TcpLink& link);
  void remove(TcpLink& link);
  /// In a forked child.
  void close_descriptors();

 private:
  void tell(TcpLink& link);

  Fd epoll_;
  std::mutex mutex_;  // guards links_: channels may end on other threads than the one that polls
  std::vector<TcpLink*> links_;
};

}  // namespace farandole
