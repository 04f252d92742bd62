// Log lines on stderr: one write each, prefixed with the rank, so lines of many ranks never tear.
#pragma once

#include <string_view>

namespace farandole {

enum class LogLevel : int { error = 0, warning = 1, info = 2, debug = 3 };

void set_log_level(LogLevel level);
void set_log_rank(int rank);  // -1: no prefix; once, at init
bool logs(LogLevel level);
void log(LogLevel level, std::string_view text);

}  // namespace farandole
