// Where a rank listens: an IPv4 or IPv6 address and a port, in a fixed layout that is checked.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"

namespace farandole {

class TcpAddress {
 public:
  /// | 4 or 6 | 0 | port, little-endian | 16 bytes of address, of IPv4 the first 4, the others 0 |
  static constexpr size_t kBytes = 20;
  using Bytes = std::array<std::byte, kBytes>;

  /// The loopback of that family (4, 6), any port.
  static TcpAddress loopback(int family);
  /// Nothing if `bytes` are no address at which a rank may listen.
  static std::optional<TcpAddress> from(std::span<const std::byte> bytes);
  /// Where a socket of ours listens.
  static TcpAddress of_listener(int socket);
  /// Several addresses, one after the other, as a rank shows them; nothing if there is none, or one
  /// of them is no address.
  static std::optional<std::vector<TcpAddress>> all_from(std::span<const std::byte> bytes);

  /// The address at the other end of a connection; nothing if it is not connected.
  static std::optional<TcpAddress> of_peer(int socket);

  /// Whether both are at one address, at whatever port.
  bool shares_host_with(const TcpAddress& other) const;
  Bytes bytes() const;
  std::string text() const;  // "127.0.0.1:4711", "[::1]:4711"
  int family() const { return storage_.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const;

 private:
  sockaddr_storage storage_{};
};

/// Listens on loopback at a port of the kernel's choice: IPv4, or IPv6 where there is none.
/// `family` (4, 6) takes that one alone. Non-blocking, close-on-exec.
Fd listen_on_loopback(std::optional<int> family = std::nullopt);

/// Begins to connect; empty, with errno, if that cannot begin.
Fd begin_to_connect(const TcpAddress& address);

/// Whether a socket that began to connect is connected.
bool is_connected(int socket);

/// Whether the other end of a connection has closed it, or it is broken.
bool has_hung_up(int socket);

/// Sets the options of a connection: data leave at once, and a silent peer is probed.
void prepare_connection(int socket);

}  // namespace farandole
