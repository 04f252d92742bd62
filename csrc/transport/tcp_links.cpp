#include "transport/tcp_links.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstddef>

namespace farandole {
namespace {

/// The kernel's struct tcp_info as far as Linux 4.1 fills it, declared here because C libraries
/// differ in how much of it they know.
struct KernelInfo {
  uint8_t state, congestion, retransmits, probes, backoff, options, scales, flags;
  uint32_t rto, ato, send_mss, receive_mss, unacknowledged;
  uint32_t others[19];
  uint64_t pacing_rate, most_pacing_rate, bytes_acknowledged, bytes_received;
};
static_assert(sizeof(KernelInfo) == 136 && offsetof(KernelInfo, bytes_acknowledged) == 120);

}  // namespace

TcpTraffic traffic_on(int socket) {
  KernelInfo info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  // A rank that is stopped takes no more one day; its kernel still answers when it is asked.
  return {info.bytes_acknowledged, info.bytes_received,
          info.unacknowledged == 0 && info.probes <= 1};
}

void TcpLinks::add(int socket, int peer) {
  const std::lock_guard lock(mutex_);
  peers_[socket] = peer;
}

void TcpLinks::remove(int socket) {
  const std::lock_guard lock(mutex_);
  peers_.erase(socket);
}

TcpTraffic TcpLinks::traffic_with(int peer) const {
  TcpTraffic sum;
  const std::lock_guard lock(mutex_);
  for (const auto& [socket, other] : peers_) {
    if (other != peer) continue;
    const TcpTraffic traffic = traffic_on(socket);
    sum.acknowledged += traffic.acknowledged;
    sum.received += traffic.received + 1;  // also where it is new, or gone
  }
  return sum;
}

}  // namespace farandole
