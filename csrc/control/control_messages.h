// Messages between ranks on several hosts on their control connections (control/control_mesh.h),
// field by field (base/message.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/message.h"
#include "control/failure_detector.h"
#include "control/progress_board.h"
#include "transport/segment.h"
#include "transport/wait_board.h"

namespace farandole {

/// The first byte of each message.
enum class ControlFrame : uint8_t {
  resume,  // the first on a connection
  beat,
  ping,  // what time is it there?
  pong,
  state,  // of a rank, and of its streams
  report,
  verdict,
  question,  // how far is a stream?
  answer,
  look,  // what does the rank wait in?
  waits,
  deadlock,
  lost_sight,  // of whom?
  stops,       // which ranks of this host are stopped?
  death        // of a rank of this host: how?
};

inline constexpr size_t kMostStreams = 1 << 16;
inline constexpr size_t kMostHoldups = 4;

struct ResumeMessage {
  static constexpr auto kTag = ControlFrame::resume;
  uint64_t taken = 0;  // how many messages have come on all connections before
};
template <>
inline constexpr auto fields_of<ResumeMessage> = Fields<Sent<&ResumeMessage::taken>>{};

/// Says that the rank is there, and how many messages have come.
struct BeatMessage {
  static constexpr auto kTag = ControlFrame::beat;
  uint64_t taken = 0;
};
template <>
inline constexpr auto fields_of<BeatMessage> = Fields<Sent<&BeatMessage::taken>>{};

/// The same, of a rank that wants to know the time.
struct PingMessage {
  static constexpr auto kTag = ControlFrame::ping;
  uint64_t taken = 0;
  int64_t sent = 0;  // by the asker's clock, in nanoseconds
};
template <>
inline constexpr auto fields_of<PingMessage> =
    Fields<Sent<&PingMessage::taken>, Sent<&PingMessage::sent>>{};

struct PongMessage {
  static constexpr auto kTag = ControlFrame::pong;
  int64_t sent = 0;                   // as it was asked
  int64_t arrived = 0, answered = 0;  // by this rank's clock
};
template <>
inline constexpr auto fields_of<PongMessage> =
    Fields<Sent<&PongMessage::sent>, Sent<&PongMessage::arrived>, Sent<&PongMessage::answered>>{};

template <>
inline constexpr auto fields_of<StreamProgress> =
    Fields<Sent<&StreamProgress::begun>, Sent<&StreamProgress::completed>,
           Sent<&StreamProgress::holdups, kMostHoldups>>{};

struct ProgressOfStream {
  uint64_t key = 0;
  StreamProgress progress;
};
template <>
inline constexpr auto fields_of<ProgressOfStream> =
    Fields<Sent<&ProgressOfStream::key>, Sent<&ProgressOfStream::progress>>{};

/// As it stands in the rank's page.
struct StateMessage {
  static constexpr auto kTag = ControlFrame::state;
  uint64_t state = 0, farewell = 0;  // RankState, FarewellState
  int32_t exit_code = 0;
  std::string what, place;
  std::vector<ProgressOfStream> streams;
};
template <>
inline constexpr auto fields_of<StateMessage> =
    Fields<Sent<&StateMessage::state>, Sent<&StateMessage::farewell>,
           Sent<&StateMessage::exit_code>, Sent<&StateMessage::what, sizeof Farewell::what>,
           Sent<&StateMessage::place, sizeof Farewell::place>,
           Sent<&StateMessage::streams, kMostStreams>>{};

template <>
inline constexpr auto fields_of<ErrorRecord> =
    Fields<Sent<&ErrorRecord::code>, Sent<&ErrorRecord::rank>, Sent<&ErrorRecord::peer>,
           Sent<&ErrorRecord::pid>, Sent<&ErrorRecord::signal>, Sent<&ErrorRecord::lane>,
           Sent<&ErrorRecord::step>, Sent<&ErrorRecord::sequence>, Sent<&ErrorRecord::bytes_done>,
           Sent<&ErrorRecord::bytes_total>, Sent<&ErrorRecord::verdict>,
           Sent<&ErrorRecord::evidence>, Sent<&ErrorRecord::advice>, Sent<&ErrorRecord::operation>,
           Sent<&ErrorRecord::tensor>, Sent<&ErrorRecord::field>, Sent<&ErrorRecord::host>,
           Sent<&ErrorRecord::values>>{};

/// A group has failed, as its member sees it.
struct ReportMessage {
  static constexpr auto kTag = ControlFrame::report;
  uint64_t key = 0;
  std::vector<int> members;
  ErrorRecord record{};
  int by = -1;  // the rank that has seen it
};
template <>
inline constexpr auto fields_of<ReportMessage> =
    Fields<Sent<&ReportMessage::key>, Sent<&ReportMessage::members, kMostRanks>,
           Sent<&ReportMessage::record>, Sent<&ReportMessage::by>>{};

struct VerdictMessage {
  static constexpr auto kTag = ControlFrame::verdict;
  uint64_t key = 0;
  ErrorRecord record{};
};
template <>
inline constexpr auto fields_of<VerdictMessage> =
    Fields<Sent<&VerdictMessage::key>, Sent<&VerdictMessage::record>>{};

struct QuestionMessage {
  static constexpr auto kTag = ControlFrame::question;
  uint64_t key = 0;   // of a stream
  uint64_t fate = 0;  // and of its group's verdict
};
template <>
inline constexpr auto fields_of<QuestionMessage> =
    Fields<Sent<&QuestionMessage::key>, Sent<&QuestionMessage::fate>>{};

template <>
inline constexpr auto fields_of<StreamAnswer> =
    Fields<Sent<&StreamAnswer::progress>, Sent<&StreamAnswer::closed>>{};

struct AnswerMessage {
  static constexpr auto kTag = ControlFrame::answer;
  uint64_t key = 0;
  StreamAnswer answer;
};
template <>
inline constexpr auto fields_of<AnswerMessage> =
    Fields<Sent<&AnswerMessage::key>, Sent<&AnswerMessage::answer>>{};

struct LookMessage {
  static constexpr auto kTag = ControlFrame::look;
  int64_t asked = 0;  // by the asker's clock
};
template <>
inline constexpr auto fields_of<LookMessage> = Fields<Sent<&LookMessage::asked>>{};

/// Words of a WaitBoard, as they lie there.
struct BoardWords {
  int64_t there = 0;  // what time it is
  std::vector<uint64_t> waits, threads;
};
template <>
inline constexpr auto fields_of<BoardWords> =
    Fields<Sent<&BoardWords::there>, Sent<&BoardWords::waits, kWaitWords>,
           Sent<&BoardWords::threads, sizeof(ThreadReport) / sizeof(uint64_t)>>{};

/// Its board's words follow.
struct WaitsMessage {
  static constexpr auto kTag = ControlFrame::waits;
  int64_t asked = 0;
};
template <>
inline constexpr auto fields_of<WaitsMessage> = Fields<Sent<&WaitsMessage::asked>>{};

struct DeadlockMessage {
  static constexpr auto kTag = ControlFrame::deadlock;
  int64_t stands = 0;
  ErrorRecord record{};
};
template <>
inline constexpr auto fields_of<DeadlockMessage> =
    Fields<Sent<&DeadlockMessage::stands>, Sent<&DeadlockMessage::record>>{};

struct LostSightMessage {
  static constexpr auto kTag = ControlFrame::lost_sight;
  std::vector<int> ranks;  // all of them
};
template <>
inline constexpr auto fields_of<LostSightMessage> =
    Fields<Sent<&LostSightMessage::ranks, kMostRanks>>{};

struct StopsMessage {
  static constexpr auto kTag = ControlFrame::stops;
  std::vector<int> ranks;  // all of them, but for the sender
};
template <>
inline constexpr auto fields_of<StopsMessage> = Fields<Sent<&StopsMessage::ranks, kMostRanks>>{};

/// How a rank has ended, by one that has seen it or was told.
struct DeathMessage {
  static constexpr auto kTag = ControlFrame::death;
  int32_t rank = -1, signal = 0, exit_code = -1;  // Death
};
template <>
inline constexpr auto fields_of<DeathMessage> =
    Fields<Sent<&DeathMessage::rank>, Sent<&DeathMessage::signal>,
           Sent<&DeathMessage::exit_code>>{};

/// As it is sent: its fields behind its tag.
template <typename Message, typename... Values>
FrameWriter frame_of(const Values&... values) {
  FrameWriter frame;
  put_tagged<Message>(frame, values...);
  return frame;
}

// ---- structs in the words of a board: all of each travels as it lies ----

template <>
inline constexpr auto fields_of<WaitHead> =
    Fields<Sent<&WaitHead::looked>, Sent<&WaitHead::still_since>, Sent<&WaitHead::stands>,
           Sent<&WaitHead::complete>, Sent<&WaitHead::titles>, Sent<&WaitHead::waits>>{};
template <>
inline constexpr auto fields_of<WaitTitle> = Fields<Sent<&WaitTitle::text>>{};
template <>
inline constexpr auto fields_of<Wait> =
    Fields<Sent<&Wait::key>, Sent<&Wait::sequence>, Sent<&Wait::kind>, Sent<&Wait::count>,
           Sent<&Wait::ranks>, Sent<&Wait::spare>>{};
template <>
inline constexpr auto fields_of<ThreadReport> =
    Fields<Sent<&ThreadReport::looked>, Sent<&ThreadReport::still_since>,
           Sent<&ThreadReport::stands>, Sent<&ThreadReport::state>, Sent<&ThreadReport::place>,
           Sent<&ThreadReport::step>>{};

}  // namespace farandole
