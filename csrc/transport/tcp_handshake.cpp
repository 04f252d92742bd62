#include "transport/tcp_handshake.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/message_layout.h"

namespace farandole {
namespace {

constexpr std::string_view kWireMagic = "farandol";
constexpr uint32_t kProtocol = 11;  // tests/cpp/test_message_layout.cpp knows its messages

template <size_t Bytes>
std::array<std::byte, Bytes> bytes_of(std::string_view text) {
  std::array<std::byte, Bytes> bytes{};
  const auto all = std::as_bytes(std::span(text));
  std::ranges::copy(all.first(std::min(all.size(), Bytes)), bytes.begin());
  return bytes;
}

/// Data travel as they lie in memory.
std::array<std::byte, 4> own_byte_order() {
  return std::bit_cast<std::array<std::byte, 4>>(uint32_t{0x01020304});
}

std::string hexadecimal(uint64_t value) {
  char digits[17];
  return {digits, std::to_chars(digits, digits + sizeof digits, value, 16).ptr};
}

template <size_t Bytes>
std::string hexadecimal(const std::array<std::byte, Bytes>& bytes) {
  std::string text;
  for (const std::byte b : bytes) {
    const std::string digits = hexadecimal(std::to_integer<uint64_t>(b));
    text += (digits.size() == 1 ? "0" : "") + digits;
  }
  return text;
}

class Writer {
 public:
  explicit Writer(std::span<std::byte> to) : to_(to) {}
  template <typename Number>
  void put(Number value) {
    for (size_t i = 0; i < sizeof value; ++i) to_[at_++] = static_cast<std::byte>(value >> 8 * i);
  }
  template <size_t Bytes>
  void put(const std::array<std::byte, Bytes>& bytes) {
    for (const std::byte b : bytes) to_[at_++] = b;
  }

 private:
  std::span<std::byte> to_;
  size_t at_ = 0;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> from) : from_(from) {}
  template <typename Number>
  void get(Number& value) {
    value = 0;
    for (size_t i = 0; i < sizeof value; ++i)
      value |= static_cast<Number>(std::to_integer<Number>(from_[at_++]) << 8 * i);
  }
  template <size_t Bytes>
  void get(std::array<std::byte, Bytes>& bytes) {
    for (std::byte& b : bytes) b = from_[at_++];
  }

 private:
  std::span<const std::byte> from_;
  size_t at_ = 0;
};

}  // namespace

std::vector<std::pair<std::string, std::string>> wire_format() {
  return {{"protocol", std::to_string(kProtocol)},
          {"byte order", hexadecimal(own_byte_order())},
          {"message layouts", hexadecimal(message_layouts())}};
}

std::array<std::byte, TcpHello::kBytes> TcpHello::encoded() const {
  std::array<std::byte, kBytes> bytes{};
  Writer into(bytes);
  into.put(magic);
  into.put(protocol);
  into.put(byte_order);
  into.put(layouts);
  into.put(role);
  into.put(from);
  into.put(to);
  into.put(lane);
  into.put(stream_key);
  into.put(nonce);
  return bytes;
}

TcpHello TcpHello::decoded(std::span<const std::byte, kBytes> bytes) {
  TcpHello hello;
  Reader out_of(bytes);
  out_of.get(hello.magic);
  out_of.get(hello.protocol);
  out_of.get(hello.byte_order);
  out_of.get(hello.layouts);
  out_of.get(hello.role);
  out_of.get(hello.from);
  out_of.get(hello.to);
  out_of.get(hello.lane);
  out_of.get(hello.stream_key);
  out_of.get(hello.nonce);
  return hello;
}

TcpHandshake TcpHandshake::dial(const TcpLane& lane, Secret secret) {
  TcpHandshake mine(Phase::answer, lane.dialer, 0, secret);
  mine.lane_ = lane;
  mine.dialers_ = mine.hello(TcpHello::dials).encoded();
  mine.say(mine.dialers_);
  return mine;
}

TcpHandshake TcpHandshake::listen(int rank, int ranks, Secret secret) {
  return {Phase::hello, rank, ranks, secret};
}

size_t TcpHandshake::to_read() const {
  switch (phase_) {
    case Phase::hello:
      return TcpHello::kBytes;
    case Phase::answer:
      return TcpHello::kBytes + sizeof(Digest);
    case Phase::proof:
      return sizeof(Digest);
    default:
      return 0;
  }
}

void TcpHandshake::take(std::span<const std::byte> bytes) {
  if (phase_ == Phase::hello)
    take_hello(bytes);
  else if (phase_ == Phase::answer)
    take_answer(bytes);
  else if (phase_ == Phase::proof)
    take_proof(bytes);
}

/// This rank's hello for the lane of the handshake.
TcpHello TcpHandshake::hello(TcpHello::Role role) const {
  TcpHello mine;
  mine.magic = bytes_of<8>(kWireMagic);
  mine.protocol = kProtocol;
  mine.byte_order = own_byte_order();
  mine.layouts = message_layouts();
  mine.role = role;
  mine.from = static_cast<uint32_t>(rank_);
  mine.to = static_cast<uint32_t>(other());
  mine.lane = static_cast<uint32_t>(lane_.lane);
  mine.stream_key = lane_.stream_key;
  fill_with_random_bytes(mine.nonce);
  return mine;
}

Digest TcpHandshake::proof_of(TcpHello::Role role) const {
  const auto whose =
      bytes_of<24>(role == TcpHello::dials ? "farandole tcp, dialer" : "farandole tcp, listener");
  return hmac_sha256(secret_, {whose, dialers_, listeners_});
}

ConnectionKeys TcpHandshake::keys() const {
  std::vector<std::byte> hellos(dialers_.begin(), dialers_.end());
  hellos.insert(hellos.end(), listeners_.begin(), listeners_.end());
  const Key dialers = derived_key(secret_, hellos, "farandole tcp, seals of the dialer");
  const Key listeners = derived_key(secret_, hellos, "farandole tcp, seals of the listener");
  if (rank_ == lane_.dialer) return {.out = dialers, .in = listeners};
  return {.out = listeners, .in = dialers};
}

void TcpHandshake::say(std::span<const std::byte> bytes) {
  out_.insert(out_.end(), bytes.begin(), bytes.end());
}

void TcpHandshake::refuse(ErrorCode code, const std::string& field, const std::string& ours,
                          const std::string& theirs) {
  Context where;
  where.rank = rank_;
  where.peer = other();
  where.field = field;
  where.values = {{ours, {rank_}}, {theirs, {other()}}};
  where.evidence = describe_values(where.values);
  const std::string them =
      other() < 0 ? "a stranger" : "what speaks for rank " + std::to_string(other());
  refusal_ = Error(code,
                   "rank " + std::to_string(rank_) + " and " + them + " differ in the " + field +
                       " of a TCP connection",
                   where);
  phase_ = Phase::refused;
}

/// Refuses a wire format other than ours; the same program on every rank has the same one.
bool TcpHandshake::versions_differ(const TcpHello& theirs) {
  const std::string others[] = {std::to_string(theirs.protocol), hexadecimal(theirs.byte_order),
                                hexadecimal(theirs.layouts)};
  const auto ours = wire_format();
  for (size_t i = 0; i < ours.size(); ++i) {
    if (ours[i].second == others[i]) continue;
    refuse(ErrorCode::version_mismatch, ours[i].first, ours[i].second, others[i]);
    return true;
  }
  return false;
}

/// By the listener. A client that does not even know the magic gets no answer.
void TcpHandshake::take_hello(std::span<const std::byte> bytes) {
  std::ranges::copy(bytes, dialers_.begin());
  const TcpHello theirs = TcpHello::decoded(dialers_);
  if (theirs.magic != bytes_of<8>(kWireMagic)) {
    refuse(ErrorCode::authentication, "magic", std::string(kWireMagic), hexadecimal(theirs.magic));
    return;
  }
  lane_ = {static_cast<int>(std::min<uint32_t>(theirs.from, INT32_MAX)), rank_, theirs.stream_key,
           static_cast<int>(std::min<uint32_t>(theirs.lane, INT32_MAX))};
  listeners_ = hello(TcpHello::listens).encoded();
  say(listeners_);
  say(proof_of(TcpHello::listens));
  phase_ = Phase::proof;
  check_claim(theirs);
  if (!refusal_ && versions_differ(theirs)) phase_ = Phase::proof;  // is it really a rank of ours?
}

/// By the listener: refuses a connection that no rank of ours would make.
void TcpHandshake::check_claim(const TcpHello& theirs) {
  const auto wrong = [&](const std::string& field, const std::string& ours, uint32_t other) {
    refuse(ErrorCode::authentication, field, ours, std::to_string(other));
  };
  if (theirs.role != TcpHello::dials)
    wrong("role", std::to_string(TcpHello::dials), theirs.role);
  else if (lane_.dialer >= std::min(rank_, ranks_))
    wrong("rank that dials", "one below " + std::to_string(rank_), theirs.from);
  else if (theirs.to != static_cast<uint32_t>(rank_))
    wrong("rank that listens", std::to_string(rank_), theirs.to);
  else if (lane_.lane >= kMostTcpLanes)
    wrong("lane", "one below " + std::to_string(kMostTcpLanes), theirs.lane);
}

/// By the dialer.
void TcpHandshake::take_answer(std::span<const std::byte> bytes) {
  std::ranges::copy(bytes.first(TcpHello::kBytes), listeners_.begin());
  const TcpHello theirs = TcpHello::decoded(listeners_);
  const auto same = [&](const std::string& field, uint64_t ours, uint64_t other) {
    if (ours == other) return true;
    refuse(ErrorCode::authentication, field, std::to_string(ours), std::to_string(other));
    return false;
  };
  if (theirs.magic != bytes_of<8>(kWireMagic)) {
    refuse(ErrorCode::authentication, "magic", std::string(kWireMagic), hexadecimal(theirs.magic));
    return;
  }
  const bool holds =
      same("role", TcpHello::listens, theirs.role) &&
      same("rank that listens", static_cast<uint32_t>(lane_.listener), theirs.from) &&
      same("rank that dials", static_cast<uint32_t>(lane_.dialer), theirs.to) &&
      same("lane", static_cast<uint32_t>(lane_.lane), theirs.lane) &&
      same("stream", lane_.stream_key, theirs.stream_key);
  if (!holds) return;
  versions_differ(theirs);
  take_proof(bytes.subspan(TcpHello::kBytes));
  if (proved_) say(proof_of(TcpHello::dials));  // one that differs is to know of whom, too
}

void TcpHandshake::take_proof(std::span<const std::byte> bytes) {
  const auto whose = rank_ == lane_.dialer ? TcpHello::listens : TcpHello::dials;
  proved_ = equal_in_constant_time(proof_of(whose), bytes);
  if (refusal_)
    phase_ = Phase::refused;
  else if (proved_)
    phase_ = Phase::agreed;
  else
    refuse(ErrorCode::authentication, "proof", "by the secret of this job", "another one");
}

}  // namespace farandole
