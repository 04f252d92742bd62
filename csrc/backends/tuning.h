// Measured speeds of this kind of host: the numbers from which choices among paths and planners
// follow. A value; all ranks of a world hold the same one (rank 0's).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backends/paths.h"
#include "schedule/channel_costs.h"

namespace farandole {

/// The costs that paths' rows give themselves.
std::vector<PathCosts> usual_costs();

/// Between these a number of seconds is believed; beyond, a file is damaged.
inline constexpr double kLeastSeconds = 1e-15;
inline constexpr double kMostSeconds = 10;

/// Costs of an all-reduce by MPI itself, between hosts. In seconds: each doubling of the ranks, and
/// a byte of those that a rank sends at least.
struct MpiCosts {
  static constexpr double kUnmeasured = 1;  // a second: no measured round takes so long
  double round = kUnmeasured;
  double byte = 1 / 1.8e9;

  bool is_measured() const { return round < kUnmeasured; }
  friend bool operator==(const MpiCosts&, const MpiCosts&) = default;
};
double predicted_seconds(const MpiCosts& costs, int ranks, size_t bytes);

struct TuningTable {
  bool measured = false;  // by `farandole tune`, or at the first `farandole run`
  ChannelCosts channels;
  ChannelCosts network = kTcpCosts;  // between hosts; what is inside them is of `channels`
  std::vector<PathCosts> paths = usual_costs();  // by path_table(); without measured ones, paths
                                                 // follow in their usual order (choose_path)
  MpiCosts mpi;
  std::string origin = "defaults";  // where the numbers come from, in a line of words

  friend bool operator==(const TuningTable&, const TuningTable&) = default;
};

/// One number of a table.
struct TuningField {
  std::string name;
  std::string doc;
  double* value;
};
/// All of them, in order; a row of path_table() has two.
std::vector<TuningField> tuning_fields(TuningTable& table);

inline constexpr size_t kMostOrigin = 160;      // characters
inline constexpr size_t kMostTableText = 1280;  // characters, of any table that is not refused

/// Throws Error(invalid_argument), naming the field, for a number that cannot have been measured,
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
