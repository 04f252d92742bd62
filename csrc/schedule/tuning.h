// What this kind of host was measured to do: the numbers from which choices among paths and
// planners follow. A value; all ranks of a world hold the same one (rank 0's).
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace farandole {

/// In seconds. The defaults are orders of magnitude: good enough for planners, where they tell
/// latency from bandwidth; paths then follow in their usual order (choose_path).
struct TuningTable {
  bool measured = false;  // by `farandole tune`, or at the first `farandole run`
  // Schedules over byte channels: a hand-over between polling ranks, a step whose message is there
  // already, a byte copied in and out of the channel, a byte folded.
  double channel_round = 5e-6;
  double channel_message = 5e-7;
  double channel_byte = 1 / 5e9;
  double channel_folded_byte = 1 / 10e9;
  // Paths over shared memory: one operation of no data, and each byte that a rank reads or copies.
  double lines_start = 0.5e-6;
  double lines_byte = 1 / 25e9;
  double one_shot_start = 1.5e-6;
  double one_shot_byte = 1 / 25e9;
  double window_start = 1.5e-6;
  double window_byte = 1 / 50e9;
  double push_start = 3e-6;
  double push_byte = 1 / 25e9;
  double pull_start = 3e-6;
  double pull_byte = 1 / 25e9;
  double staged_start = 4e-6;
  double staged_byte = 1 / 25e9;

  std::string origin = "defaults";  // where the numbers come from, in a line of words

  friend bool operator==(const TuningTable&, const TuningTable&) = default;
};

struct TuningField {
  std::string_view name;
  double TuningTable::* value;
  std::string_view doc;
};
inline constexpr std::array<TuningField, 16> kTuningFields{{
    {"channel_round", &TuningTable::channel_round, "schedules: a message somebody waits for"},
    {"channel_message", &TuningTable::channel_message,
     "schedules: a message that is there already"},
    {"channel_byte", &TuningTable::channel_byte, "schedules: a byte through a channel"},
    {"channel_folded_byte", &TuningTable::channel_folded_byte, "schedules: a byte folded"},
    {"lines_start", &TuningTable::lines_start, "path lines: an operation without data"},
    {"lines_byte", &TuningTable::lines_byte, "path lines: a byte read or copied"},
    {"one_shot_start", &TuningTable::one_shot_start, "path one_shot: an operation without data"},
    {"one_shot_byte", &TuningTable::one_shot_byte, "path one_shot: a byte read or copied"},
    {"window_start", &TuningTable::window_start, "path window: an operation without data"},
    {"window_byte", &TuningTable::window_byte, "path window: a byte read or copied"},
    {"push_start", &TuningTable::push_start, "path push: an operation without data"},
    {"push_byte", &TuningTable::push_byte, "path push: a byte read or written"},
    {"pull_start", &TuningTable::pull_start, "path pull: an operation without data"},
    {"pull_byte", &TuningTable::pull_byte, "path pull: a byte read"},
    {"staged_start", &TuningTable::staged_start, "path staged: an operation without data"},
    {"staged_byte", &TuningTable::staged_byte, "path staged: a byte read or copied"},
}};

/// Between these a number of seconds is believed; beyond, a file is damaged.
inline constexpr double kLeastSeconds = 1e-15;
inline constexpr double kMostSeconds = 10;
inline constexpr size_t kMostOrigin = 160;      // characters
inline constexpr size_t kMostTableText = 1024;  // characters, of any table that is not refused

/// Throws Error(invalid_argument), naming the field, for a number that nobody can have measured,
/// or an origin that is longer than kMostOrigin or not one line of printable ASCII.
void require_valid(const TuningTable& table);

/// One line `name=value` for `measured` (0, 1) and each field, then the origin; exact, and at most
/// kMostTableText long.
std::string text_of(const TuningTable& table);
/// The other way round. Throws Error(invalid_argument) unless `text` is what text_of makes of a
/// valid table.
TuningTable table_from(std::string_view text);

/// 16 hexadecimal digits of all but the origin: equal exactly where all choices are.
std::string fingerprint(const TuningTable& table);

}  // namespace farandole
