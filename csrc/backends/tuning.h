// What this kind of host was measured to do: the numbers from which choices among paths and
// planners follow. A value; all ranks of a world hold the same one (rank 0's).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backends/paths.h"
#include "schedule/channel_costs.h"

namespace farandole {

/// The costs that paths' rows give themselves.
std::vector<PathCosts> usual_costs();

struct TuningTable {
  bool measured = false;  // by `farandole tune`, or at the first `farandole run`
  ChannelCosts channels;
  ChannelCosts network = kTcpCosts;  // between hosts; what is inside them is of `channels`
  std::vector<PathCosts> paths = usual_costs();  // by path_table(); without measured ones, paths
                                                 // follow in their usual order (choose_path)
  std::string origin = "defaults";               // where the numbers come from, in a line of words

  friend bool operator==(const TuningTable&, const TuningTable&) = default;
};

/// One number of a table.
struct TuningField {
  std::string name;
  std::string doc;
  double* value;
};
/// All of them, in order; a row of path_table() has two.
std::vector<TuningField> fields_of(TuningTable& table);

/// Between these a number of seconds is believed; beyond, a file is damaged.
inline constexpr double kLeastSeconds = 1e-15;
inline constexpr double kMostSeconds = 10;
inline constexpr size_t kMostOrigin = 160;      // characters
inline constexpr size_t kMostTableText = 1280;  // characters, of any table that is not refused

/// Throws Error(invalid_argument), naming the field, for a number that nobody can have measured,
/// or an origin that is longer than kMostOrigin or not one line of printable ASCII.
void require_valid(TuningTable table);

/// One line `name=value` for `measured` (0, 1) and each field, then the origin; exact, and at most
/// kMostTableText long.
std::string text_of(const TuningTable& table);
/// The other way round. Throws Error(invalid_argument) unless `text` is what text_of makes of a
/// valid table.
TuningTable table_from(std::string_view text);

/// 16 hexadecimal digits of all but the origin: equal exactly where all choices are.
std::string fingerprint(const TuningTable& table);

}  // namespace farandole
