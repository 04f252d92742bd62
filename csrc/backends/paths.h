// The paths over shared memory: a table of rows, each in the file of its path, and a pure choice.
//
// A new path is a file that makes a DirectPath and defines its row, and a line in paths.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "backends/direct_path.h"

namespace farandole {

struct TuningTable;

/// In seconds: an operation without data, and a byte that a rank reads or copies.
struct PathCosts {
  double start = 0, byte = 0;
  friend bool operator==(const PathCosts&, const PathCosts&) = default;
};

/// How ranks learn that all have started the same operation.
enum class AgreesBy : uint8_t {
  posts,      // they compare what they have posted, and only then look at data
  meanwhile,  // they show data while they compare
  in_data,    // the data carry it; no rank looks at posts, nor at where buffers lie
};

/// How a path runs in a group of one.
enum class Alone : uint8_t { nothing, as_ever, any_length };

constexpr uint32_t bit(Collective kind) { return 1U << static_cast<unsigned>(kind); }
inline constexpr uint32_t kAnyCollective = ~uint32_t{0};
inline constexpr size_t kUnlimited = ~size_t{0};

struct PathRow {
  std::string_view name;
  std::unique_ptr<DirectPath> (*make)(const StreamMemory&);
  uint32_t kinds = kAnyCollective;  // a bit for each collective
  size_t most_bytes = kUnlimited;   // of the longest input
  size_t (*least_bytes)(Collective) = [](Collective) -> size_t { return 0; };
  AgreesBy agrees_by = AgreesBy::posts;
  Alone alone = Alone::as_ever;
  bool mapped = false;      // needs input and output in memory that all ranks map
  bool by_address = false;  // reaches other ranks' memory by address
  bool copies = false;      // is out where ranks were told to do that
  PathCosts usual{};        // orders of magnitude, until somebody measures
  /// How often the busiest rank reads, copies or writes as many bytes as the input has.
  double (*traffic)(Collective, double size);
};

/// How many inputs' worth the busiest rank looks at: all, or a part of each.
double inputs_read(Collective kind, double size);

/// Preferred ones first, but for those that need mapped memory: they are preferred where it is. The
/// last one runs what no other does. The barrier is no path, as it has no data.
std::span<const PathRow* const> path_table();
/// Null when there is no path of that name.
const PathRow* path_named(std::string_view name);

/// Whether the path could run this when it is asked for by name, as far as all ranks know.
bool fits(const PathRow& row, Collective kind, size_t bytes);

/// The facts on which the choice depends; the same on all ranks.
struct PathQuestion {
  Collective kind = Collective::all_reduce;
  size_t bytes = 0;       // of the longest input
  int size = 1;           // ranks
  bool shared = false;    // all ranks have shown that they map what such paths need
  bool foreign = false;   // ranks may reach each other's memory by address, and found it faster
  bool demanded = false;  // and were told to do so anyway
};

/// The preferred path: a mapped one where it is not refused, else the first such row. With a
/// measured table, another one where it is predicted to take less than kWorthLeaving of the
/// preferred one's time. Null for a barrier.
///
/// Pure. Ranks start before they know where the others' buffers lie, and ask once more with
/// `shared` when they do: then the answer is the same or a mapped path.
const PathRow* choose_path(const PathQuestion& question, const TuningTable& table);

/// Predictions err by tens of percent: less than this is no reason to leave the usual way.
inline constexpr double kWorthLeaving = 0.9;

double predicted_seconds(const PathRow& row, const PathQuestion& question,
                         const TuningTable& table);

/// Why choose_path does not consider the path, for people; empty where it does.
std::string why_not(const PathRow& row, const PathQuestion& question, const TuningTable& table);

}  // namespace farandole
