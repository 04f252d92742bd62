// The names that an operation's `algorithm` may have.
#pragma once

#include <string_view>
#include <vector>

namespace farandole {

/// Paths over shared memory, then planners, each name once. Submitting an operation checks whether
/// its algorithm fits.
std::vector<std::string_view> algorithm_names();

/// Throws Error(invalid_argument) when no operation has an algorithm of that name.
/// `setting`: where the name was given, for the message.
void require_algorithm_name(std::string_view setting, std::string_view name);

}  // namespace farandole
