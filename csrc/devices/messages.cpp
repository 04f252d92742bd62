// All that ranks on several hosts say to each other, in one number: here, where all of it is seen.
// The connections' handshake (transport/tcp_handshake.h), which lies below, knows this number
// alone.

#include "base/message_layout.h"
#include "control/control_messages.h"
#include "devices/nccl_messages.h"
#include "named/negotiation_messages.h"
#include "stream/agreement_messages.h"
#include "transport/mpi_frame.h"

namespace farandole {

template <>
inline constexpr auto fields_of<MpiFrame> =
    Fields<Sent<&MpiFrame::world>, Sent<&MpiFrame::stream>, Sent<&MpiFrame::lane>,
           Sent<&MpiFrame::kind, MpiFrameKind::place>, Sent<&MpiFrame::count>, Sent<&MpiFrame::tag>,
           Sent<&MpiFrame::takes>>{};

namespace {

// They are copied as they lie in memory: no field of them may be missing in its list.
static_assert(are_all_fields_of<MpiFrame>());
static_assert(are_all_fields_of<WaitHead>());
static_assert(are_all_fields_of<WaitTitle>());
static_assert(are_all_fields_of<Wait>());
static_assert(are_all_fields_of<ThreadReport>());

constexpr uint64_t kMessageLayouts = [] {
  LayoutHash hash;
  add_enum<ControlFrame::death>(hash);
  add_enum<Offered::join>(hash);
  add_enum<Ordered::joined>(hash);
  hash.add(layouts_of<ResumeMessage, BeatMessage, PingMessage, PongMessage, StateMessage,
                      ReportMessage, VerdictMessage, QuestionMessage, AnswerMessage, LookMessage,
                      WaitsMessage, BoardWords, WaitHead, WaitTitle, Wait, ThreadReport,
                      DeadlockMessage, LostSightMessage, StopsMessage, DeathMessage>());
  hash.add(layouts_of<StartedMessage, Shown, MpiFrame>());
  hash.add(layouts_of<OfferedHead, OfferedBits, OfferedList, OfferedFull, OfferedJoin>());
  hash.add(layouts_of<OrderedHead, OrderedRuns, OrderedAgreed, OrderedByProxy, OrderedRefused,
                      OrderedLate, OrderedForget, OrderedJoined>());
  hash.add(layouts_of<NcclOffer, NcclStart, NcclOutcome>());
  return hash.value();
}();

}  // namespace

uint64_t message_layouts() { return kMessageLayouts; }

}  // namespace farandole
