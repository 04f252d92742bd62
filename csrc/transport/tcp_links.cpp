#include "transport/tcp_links.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace farandole {
namespace {

/// As Linux fills it since 4.1: the C library's struct ends before.
struct LongerInfo : tcp_info {
  uint64_t pacing_rate, most_pacing_rate, bytes_acknowledged, bytes_received;
};
static_assert(sizeof(tcp_info) == 104 && sizeof(LongerInfo) == 136);

}  // namespace

TcpTraffic traffic_on(int socket) {
  LongerInfo info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  // A rank that is stopped takes no more one day; its kernel still answers when it is asked.
  return {info.bytes_acknowledged, info.bytes_received,
          info.tcpi_unacked == 0 && info.tcpi_probes <= 1};
}

void TcpLinks::add(int socket, int peer) {
  const std::lock_guard lock(mutex_);
  peers_[socket] = peer;
}

void TcpLinks::remove(int socket) {
  const std::lock_guard lock(mutex_);
  peers_.erase(socket);
}

uint64_t TcpLinks::moved(int peer) const {
  uint64_t sum = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& [socket, other] : peers_) {
    if (other != peer) continue;
    const TcpTraffic traffic = traffic_on(socket);
    sum += traffic.acknowledged + traffic.received + 1;  // also where it is new, or gone
  }
  return sum;
}

}  // namespace farandole
