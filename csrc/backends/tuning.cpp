#include "backends/tuning.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "base/error.h"
#include "base/hash.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

constexpr std::string_view kMeasured = "measured", kOrigin = "origin";

[[noreturn]] void refuse(std::string why) {
  throw Error(ErrorCode::invalid_argument, "tuning table: " + std::move(why));
}

/// The shortest decimal that reads back as the same number, whatever the locale.
std::string exact(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return {text, end};
}

double number_from(std::string_view name, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    refuse(std::string(name) + " is '" + std::string(text.substr(0, 40)) + "', not a number");
  return value;
}

/// Cuts `name=value\n` off the front and returns the value.
std::string_view take_line(std::string_view& text, std::string_view name) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  if (end == std::string_view::npos || !line.starts_with(name) ||
      line.substr(name.size(), 1) != "=")
    refuse("no line with " + std::string(name) + " where it belongs");
  text.remove_prefix(end + 1);
  return line.substr(name.size() + 1);
}

std::string text_of_numbers(TuningTable table) {
  std::string text = std::string(kMeasured) + (table.measured ? "=1\n" : "=0\n");
  for (const TuningField& f : tuning_fields(table)) text += f.name + "=" + exact(*f.value) + "\n";
  return text;
}

}  // namespace

std::vector<PathCosts> usual_costs() {
  std::vector<PathCosts> costs;
  for (const PathRow* row : path_table()) costs.push_back(row->usual);
  return costs;
}

double predicted_seconds(const MpiCosts& costs, int ranks, size_t bytes) {
  const double sent = 2.0 * (ranks - 1) / ranks * static_cast<double>(bytes);
  return costs.round * ceil_log2(ranks) + costs.byte * sent;
}

std::vector<TuningField> tuning_fields(TuningTable& table) {
  ChannelCosts& c = table.channels;
  std::vector<TuningField> fields{
      {"channel_round", "schedules: a message somebody waits for", &c.round},
      {"channel_message", "schedules: a message that is there already", &c.message},
      {"channel_byte", "schedules: a byte through a channel", &c.byte},
      {"channel_folded_byte", "schedules: a byte folded", &c.folded_byte},
      {"network_round", "between hosts: a message somebody waits for", &table.network.round},
      {"network_byte", "between hosts: a byte through a host's link", &table.network.byte},
      {"mpi_round", "MPI's own all-reduce: a doubling of the ranks", &table.mpi.round},
      {"mpi_byte", "MPI's own all-reduce: a byte that a rank sends", &table.mpi.byte},
  };
  for (size_t i = 0; i < path_table().size(); ++i) {
    const std::string name(path_table()[i]->name);
    fields.push_back(
        {name + "_start", "path " + name + ": an operation without data", &table.paths[i].start});
    fields.push_back({name + "_byte", "path " + name + ": a byte read, written or copied",
                      &table.paths[i].byte});
  }
  return fields;
}

void require_valid(TuningTable table) {
  for (const TuningField& f : tuning_fields(table))
    if (!(*f.value >= kLeastSeconds && *f.value <= kMostSeconds))  // also refuses nan
      refuse(f.name + " is " + exact(*f.value) + " s; believed are " + exact(kLeastSeconds) +
             " to " + exact(kMostSeconds));
  const bool printable =
      std::ranges::all_of(table.origin, [](char c) { return c >= ' ' && c <= '~'; });
  if (table.origin.empty() || table.origin.size() > kMostOrigin || !printable)
    refuse("its origin is not one line of at most " + std::to_string(kMostOrigin) + " characters");
}

std::string text_of(const TuningTable& table) {
  require_valid(table);
  return text_of_numbers(table) + std::string(kOrigin) + "=" + table.origin + "\n";
}

TuningTable table_from(std::string_view text) {
  if (text.size() > kMostTableText) refuse("it has " + std::to_string(text.size()) + " characters");
  TuningTable table;
  const std::string_view measured = take_line(text, kMeasured);
  if (measured != "0" && measured != "1") refuse("measured is neither 0 nor 1");
  table.measured = measured == "1";
  for (const TuningField& f : tuning_fields(table))
    *f.value = number_from(f.name, take_line(text, f.name));
  table.origin = take_line(text, kOrigin);
  if (!text.empty()) refuse("there is more behind its end");
  require_valid(table);
  return table;
}

std::string fingerprint(const TuningTable& table) {
  char digits[17];
  const uint64_t hash = hash_of(text_of_numbers(table));
  const auto end = std::to_chars(digits, digits + sizeof digits, hash, 16).ptr;
  const std::string text(digits, end);
  return std::string(16 - text.size(), '0') + text;
}

}  // namespace farandole
