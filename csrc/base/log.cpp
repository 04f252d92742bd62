#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <string>

#include "base/printable.h"

namespace farandole {
namespace {
// Settings of the process's one stderr, not of an engine; relaxed: they order nothing.
std::atomic<int> level_limit{static_cast<int>(LogLevel::warning)};
std::atomic<int> log_rank{-1};
constexpr std::string_view kNames[] = {"error", "warning", "info", "debug"};
}  // namespace

void set_log_level(LogLevel level) {
  level_limit.store(static_cast<int>(level), std::memory_order_relaxed);
}

void set_log_rank(int rank) { log_rank.store(rank, std::memory_order_relaxed); }

bool logs(LogLevel level) {
  return static_cast<int>(level) <= level_limit.load(std::memory_order_relaxed);
}

void log(LogLevel level, std::string_view text) {
  if (!logs(level)) return;
  std::string line = "farandole";
  if (const int rank = log_rank.load(std::memory_order_relaxed); rank >= 0)
    line += " rank " + std::to_string(rank);
  line += ": ";
  line += kNames[static_cast<size_t>(level)];
  line += ": ";
  line += printable(text);
  line += '\n';
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace farandole
