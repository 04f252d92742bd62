// Every message that ranks send each other, read from any bytes: it is refused, or it is one that
// is written and read again as it was.
#include <cstdint>

#include "control/control_messages.h"
#include "damage.h"
#include "devices/nccl_messages.h"
#include "named/negotiation_messages.h"
#include "stream/agreement_messages.h"

namespace farandole::fuzz {
namespace {

template <typename Message>
Bytes written(const Message& message) {
  WireWriter to;
  put_message(to, message);
  return to.take();
}

template <typename Message>
void read(std::span<const std::byte> bytes) {
  Message message;
  if (refused([&] { message = get_whole<Message>(bytes); })) return;
  const Bytes once = written(message);
  if (written(get_whole<Message>(once)) != once) __builtin_trap();
}

using Read = void (*)(std::span<const std::byte>);
template <typename... Messages>
constexpr std::array<Read, sizeof...(Messages)> kReads{read<Messages>...};

constexpr auto& kAll =
    kReads<ResumeMessage, BeatMessage, PingMessage, PongMessage, StateMessage, ReportMessage,
           VerdictMessage, QuestionMessage, AnswerMessage, LookMessage, WaitsMessage, BoardWords,
           DeadlockMessage, LostSightMessage, StopsMessage, DeathMessage, StartedMessage, Shown,
           OfferedHead, OfferedBits, OfferedList, OfferedFull, OfferedJoin, OrderedHead,
           OrderedRuns, OrderedAgreed, OrderedByProxy, OrderedRefused, OrderedLate, OrderedForget,
           OrderedJoined, NcclOffer, NcclStart, NcclOutcome>;

}  // namespace
}  // namespace farandole::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace farandole::fuzz;
  if (size == 0) return 0;
  kAll[data[0] % kAll.size()]({reinterpret_cast<const std::byte*>(data) + 1, size - 1});
  return 0;
}
