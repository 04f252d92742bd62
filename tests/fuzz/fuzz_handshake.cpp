// The handshake of two ends of a connection, with bytes that are damaged on their way; and the
// decoding of addresses.
#include <array>
#include <cstdint>

#include "damage.h"
#include "transport/tcp_address.h"
#include "transport/tcp_handshake.h"

namespace farandole::fuzz {
namespace {

constexpr std::array<std::byte, 32> kOurs{std::byte{1}}, kTheirs{std::byte{2}};

/// Passes `from`'s bytes, maybe damaged, to `to`, as far as `to` reads.
void pass(TcpHandshake& from, TcpHandshake& to, FuzzedDataProvider& input) {
  const auto out = from.to_send();
  Bytes bytes = damaged({out.begin(), out.end()}, input);
  from.sent(out.size());
  for (size_t at = 0; to.to_read() > 0 && to.to_read() <= bytes.size() - at;) {
    const size_t count = to.to_read();
    to.take(std::span(bytes).subspan(at, count));
    at += count;
  }
}

void shake_hands(FuzzedDataProvider& input) {
  const bool knows = input.ConsumeBool();
  const TcpLane lane{0, input.ConsumeIntegralInRange(1, 5), input.ConsumeIntegral<uint64_t>(), 0};
  TcpHandshake dialer = TcpHandshake::dial(lane, knows ? kOurs : kTheirs);
  TcpHandshake listener = TcpHandshake::listen(1, 3, kOurs);
  for (int turn = 0; turn < 3; ++turn) {
    pass(dialer, listener, input);
    pass(listener, dialer, input);
  }
  if (!knows && (listener.proved() || dialer.proved())) __builtin_trap();
  if (listener.agreed() && listener.lane() != lane) __builtin_trap();
}

void read_addresses(FuzzedDataProvider& input) {
  const auto bytes = input.ConsumeRemainingBytes<uint8_t>();
  const auto all = TcpAddress::all_from(std::as_bytes(std::span(bytes)));
  if (!all) return;
  Bytes again;
  for (const TcpAddress& address : *all) {
    const auto each = address.bytes();
    again.insert(again.end(), each.begin(), each.end());
    if (address.text().empty()) __builtin_trap();
  }
  if (!std::ranges::equal(again, std::as_bytes(std::span(bytes)))) __builtin_trap();
}

}  // namespace
}  // namespace farandole::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace farandole::fuzz;
  FuzzedDataProvider input(data, size);
  if (input.ConsumeBool())
    shake_hands(input);
  else
    read_addresses(input);
  return 0;
}
