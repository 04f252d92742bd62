// What an operation's `algorithm` may be called.
#pragma once

#include <string_view>
#include <vector>

namespace farandole {

/// Paths over shared memory, then planners, each name once; whether one fits an operation is seen
/// when that is submitted.
std::vector<std::string_view> algorithm_names();

/// Throws Error(invalid_argument) when no operation has an algorithm of that name.
/// `setting`: what gave it, for the message.
void require_algorithm_name(std::string_view setting, std::string_view name);

}  // namespace farandole
