#include "transport/tcp_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace farandole {
namespace {

constexpr int kBacklog = 1024;
constexpr std::byte kFour{4}, kSix{6};

sockaddr_in& four(sockaddr_storage& storage) { return reinterpret_cast<sockaddr_in&>(storage); }
sockaddr_in6& six(sockaddr_storage& storage) { return reinterpret_cast<sockaddr_in6&>(storage); }
const sockaddr_in& four(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in&>(storage);
}
const sockaddr_in6& six(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in6&>(storage);
}

Fd make_socket(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
}

/// As well as the kernel can: nothing depends on it.
void set(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof value);
}

/// None, with errno, where there is no such loopback.
Fd try_to_listen(int family) {
  const TcpAddress where = TcpAddress::loopback(family);
  Fd socket = make_socket(where.family());
  if (!socket || ::bind(socket.get(), where.get(), where.length()) != 0 ||
      ::listen(socket.get(), kBacklog) != 0)
    return {};
  return socket;
}

}  // namespace

TcpAddress TcpAddress::loopback(int family) {
  TcpAddress address;
  if (family == 4) {
    address.storage_.ss_family = AF_INET;
    four(address.storage_).sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  } else {
    address.storage_.ss_family = AF_INET6;
    six(address.storage_).sin6_addr = in6addr_loopback;
  }
  return address;
}

std::optional<TcpAddress> TcpAddress::from(std::span<const std::byte> bytes) {
  if (bytes.size() != kBytes || (bytes[0] != kFour && bytes[0] != kSix)) return std::nullopt;
  TcpAddress address = loopback(bytes[0] == kFour ? 4 : 6);
  if (bytes[0] == kFour)
    std::memcpy(&four(address.storage_).sin_addr, bytes.data() + 4, sizeof(in_addr));
  else
    std::memcpy(&six(address.storage_).sin6_addr, bytes.data() + 4, sizeof(in6_addr));
  const auto port = static_cast<uint16_t>(std::to_integer<unsigned>(bytes[2]) |
                                          std::to_integer<unsigned>(bytes[3]) << 8);
  const bool everywhere =
      std::ranges::all_of(bytes.subspan(4), [](std::byte b) { return b == std::byte{0}; });
  if (port == 0 || everywhere) return std::nullopt;
  // Both families keep the port in the same place.
  four(address.storage_).sin_port = htons(port);
  if (!std::ranges::equal(address.bytes(), bytes)) return std::nullopt;
  return address;
}

std::optional<std::vector<TcpAddress>> TcpAddress::all_from(std::span<const std::byte> bytes) {
  std::vector<TcpAddress> all;
  for (; !bytes.empty(); bytes = bytes.subspan(kBytes)) {
    const auto one = bytes.size() < kBytes ? std::nullopt : from(bytes.first(kBytes));
    if (!one) return std::nullopt;
    all.push_back(*one);
  }
  return all.empty() ? std::nullopt : std::optional(std::move(all));
}

TcpAddress TcpAddress::of_listener(int socket) {
  TcpAddress address;
  socklen_t length = sizeof address.storage_;
  checked(::getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage_), &length),
          "getsockname");
  return address;
}

std::optional<TcpAddress> TcpAddress::of_peer(int socket) {
  TcpAddress address;
  socklen_t length = sizeof address.storage_;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address.storage_), &length) != 0)
    return std::nullopt;
  return address;
}

bool TcpAddress::shares_host_with(const TcpAddress& other) const {
  const Bytes a = bytes(), b = other.bytes();
  return a[0] == b[0] && std::equal(a.begin() + 4, a.end(), b.begin() + 4);
}

TcpAddress::Bytes TcpAddress::bytes() const {
  Bytes bytes{};
  const bool is_four = storage_.ss_family == AF_INET;
  const unsigned port = ntohs(four(storage_).sin_port);
  bytes[0] = is_four ? kFour : kSix;
  bytes[2] = static_cast<std::byte>(port & 0xff);
  bytes[3] = static_cast<std::byte>(port >> 8);
  if (is_four)
    std::memcpy(bytes.data() + 4, &four(storage_).sin_addr, sizeof(in_addr));
  else
    std::memcpy(bytes.data() + 4, &six(storage_).sin6_addr, sizeof(in6_addr));
  return bytes;
}

std::string TcpAddress::text() const {
  char text[INET6_ADDRSTRLEN] = {};
  const bool is_four = storage_.ss_family == AF_INET;
  const void* address = is_four ? static_cast<const void*>(&four(storage_).sin_addr)
                                : static_cast<const void*>(&six(storage_).sin6_addr);
  ::inet_ntop(storage_.ss_family, address, text, sizeof text);
  const std::string name = is_four ? std::string(text) : "[" + std::string(text) + "]";
  return name + ":" + std::to_string(ntohs(four(storage_).sin_port));
}

socklen_t TcpAddress::length() const {
  return storage_.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

Fd listen_on_loopback(std::optional<int> family) {
  Fd socket = try_to_listen(family.value_or(4));
  if (!socket && !family) socket = try_to_listen(6);
  if (!socket) throw_errno("listening on the loopback address");
  return socket;
}

Fd begin_to_connect(const TcpAddress& address) {
  Fd socket = make_socket(address.family());
  if (!socket) return {};
  if (::connect(socket.get(), address.get(), address.length()) == 0 || errno == EINPROGRESS)
    return socket;
  return {};
}

bool is_connected(int socket) { return TcpAddress::of_peer(socket).has_value(); }

bool has_hung_up(int socket) {
  std::byte next{};
  const ssize_t count = ::recv(socket, &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

void prepare_connection(int socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  // Within a minute and a half. No TCP_USER_TIMEOUT: the kernel would also end a connection whose
  // reader stands still for that long, though it answers; a rank that is stopped is to be named.
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, 6);
}

}  // namespace farandole
