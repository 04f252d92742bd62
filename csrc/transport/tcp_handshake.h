// Before anything else two ranks prove to each other, on every connection, that they know the job's
// secret. Bytes in, bytes out: no socket, no clock.
//
//   dialer                                    listener
//   hello, with a nonce                  ─►
//                                        ◄─   hello, with a nonce; its proof
//   its proof                            ─►
//
// A proof is HMAC-SHA256 by the secret over whose proof it is and both hellos, and so over both
// nonces, roles, ranks, stream and lane: neither a replay nor an echo is one. The keys of seals
// (base/seal.h) follow from the same. There is no exchange of keys besides, so an attacker who
// learns the secret later can read what was encrypted (Wire::sealed). A hello has one layout for
// ever, little-endian, whatever follows it:
//
//    0  magic        8   "farandol"             28  from         4   world rank
//    8  protocol     4                          32  to           4   world rank
//   12  byte order   4   01020304 as it lies    36  lane         4
//   16  layouts      8   a hash                 40  stream       8
//   24  role         4   0 dials, 1 listens     48  nonce       32
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/seal.h"

namespace farandole {

/// The lane of a stream that a connection carries. The lower rank dials.
struct TcpLane {
  int dialer = -1, listener = -1;  // world ranks
  uint64_t stream_key = 0;
  int lane = 0;
  auto operator<=>(const TcpLane&) const = default;
};
inline constexpr int kMostTcpLanes = 64;

using Secret = std::span<const std::byte, 32>;

/// The properties that two ranks must have in common to understand each other, with this rank's
/// values, in the order of a hello.
std::vector<std::pair<std::string, std::string>> wire_format();

struct TcpHello {
  static constexpr size_t kBytes = 80;
  enum Role : uint32_t { dials, listens };

  std::array<std::byte, 8> magic{};
  uint32_t protocol = 0;
  std::array<std::byte, 4> byte_order{};
  uint64_t layouts = 0;
  uint32_t role = dials;
  uint32_t from = 0, to = 0;
  uint32_t lane = 0;
  uint64_t stream_key = 0;
  std::array<std::byte, 32> nonce{};

  std::array<std::byte, kBytes> encoded() const;
  static TcpHello decoded(std::span<const std::byte, kBytes> bytes);
};

class TcpHandshake {
 public:
  /// Most bytes that are read from a client that has proved nothing.
  static constexpr size_t kMostRead = TcpHello::kBytes + sizeof(Digest);

  /// `secret` outlives it.
  static TcpHandshake dial(const TcpLane& lane, Secret secret);
  static TcpHandshake listen(int rank, int ranks, Secret secret);

  /// The bytes to be sent now; sent() says how many of them have been.
  std::span<const std::byte> to_send() const { return std::span(out_).subspan(sent_); }
  void sent(size_t count) { sent_ += count; }
  /// How many bytes come next; 0: none of the handshake's.
  size_t to_read() const;
  /// Exactly these.
  void take(std::span<const std::byte> bytes);

  /// Both have proved it, and nothing is left to be sent.
  bool agreed() const { return phase_ == Phase::agreed && to_send().empty(); }
  /// Why the other end is refused. Close only when nothing is left to be sent or read: the other
  /// end gets our hello, and may prove that it is a rank of ours all the same.
  const std::optional<Error>& refusal() const { return refusal_; }
  /// It knows the job's secret.
  bool proved() const { return proved_; }
  /// The keys of the bytes that follow, once both have agreed.
  ConnectionKeys keys() const;
  /// The dialer's; what the dialer has claimed.
  const TcpLane& lane() const { return lane_; }

 private:
  enum class Phase : uint8_t { hello, answer, proof, agreed, refused };

  TcpHandshake(Phase phase, int rank, int ranks, Secret secret)
      : phase_(phase), rank_(rank), ranks_(ranks), secret_(secret) {}
  TcpHello hello(TcpHello::Role role) const;
  Digest proof_of(TcpHello::Role role) const;
  void take_hello(std::span<const std::byte> bytes);
  void take_answer(std::span<const std::byte> bytes);
  void take_proof(std::span<const std::byte> bytes);
  void say(std::span<const std::byte> bytes);
  void refuse(ErrorCode code, const std::string& field, const std::string& ours,
              const std::string& theirs);
  void check_claim(const TcpHello& theirs);
  bool versions_differ(const TcpHello& theirs);
  int other() const { return rank_ == lane_.dialer ? lane_.listener : lane_.dialer; }

  Phase phase_;
  int rank_, ranks_;
  Secret secret_;
  TcpLane lane_;
  std::array<std::byte, TcpHello::kBytes> dialers_{}, listeners_{};  // hellos, as they were sent
  std::vector<std::byte> out_;
  size_t sent_ = 0;
  bool proved_ = false;
  std::optional<Error> refusal_;
};

}  // namespace farandole
