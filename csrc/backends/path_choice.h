// Which path over shared memory runs an operation: a table, and a pure choice from it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "engine/stream_page.h"
#include "schedule/tuning.h"

namespace farandole {

enum class PathKind : uint8_t { lines, one_shot, window, push, pull, staged, barrier };

/// What the choice follows from; the same on all ranks.
struct PathQuestion {
  Collective kind = Collective::all_reduce;
  size_t bytes = 0;       // of the longest input
  int size = 1;           // ranks
  bool shared = false;    // all ranks have shown that they map what the window needs
  bool foreign = false;   // ranks may reach each other's memory by address, and found it faster
  bool demanded = false;  // and were told to do so anyway
};

/// Why a path does not run an operation.
enum class Refusal : uint8_t {
  none,
  collective,
  too_long,
  memory,
  by_address,
  demanded,
  alone,
  too_short,
  too_late
};

/// From so many bytes of the longest input on, ranks hand in what is gathered; of less, the root
/// waits longer for lines that they write than for those that it reads. Two ranks, Zen 4, both
/// shares: 256 KiB read 6.8 us, handed in 15; 1 MiB 38 and 37; 4 MiB 137 and 76; 16 MiB 930 and
/// 690.
inline constexpr size_t kHandedInBytes = 1 << 20;

struct PathRow {
  PathKind path;
  std::string_view name;
  uint32_t kinds;     // a bit for each collective
  size_t most_bytes;  // of the longest input
  bool by_address;    // reaches other ranks' memory
  double TuningTable::* start;
  double TuningTable::* byte;
  /// How often the busiest rank reads, copies or writes as many bytes as the input has.
  double (*passes)(Collective, double size);
};

constexpr uint32_t bit(Collective kind) { return 1U << static_cast<unsigned>(kind); }

/// By PathKind, preferred ones first; the barrier alone has no row, as it has no data.
const std::array<PathRow, 6>& path_table();
const PathRow& row_of(PathKind path);
/// Null when there is no path of that name.
const PathRow* path_named(std::string_view name);

/// Whether the path could run this when it is asked for by name, as far as all ranks know.
bool fits(const PathRow& row, Collective kind, size_t bytes);

/// Why choose_path does not consider the path.
Refusal refusal(const PathRow& row, const PathQuestion& question, const TuningTable& table);
double predicted_seconds(const PathRow& row, const PathQuestion& question,
                         const TuningTable& table);

/// The preferred path: the window where it is not refused, else the first such row. With a measured
/// table, another one where it is predicted to take less than kWorthLeaving of the preferred one's
/// time.
///
/// Pure. Ranks start before they know where the others' buffers lie, and ask once more with
/// `shared` when they do: then the answer is the same or `window`.
PathKind choose_path(const PathQuestion& question, const TuningTable& table);

/// Predictions err by tens of percent: less than this is no reason to leave the usual way.
inline constexpr double kWorthLeaving = 0.9;

}  // namespace farandole
