// The name that a misspelt one probably means.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace farandole {

/// The name that takes the fewest changed, missing and added letters; empty when none is near.
std::string_view closest(std::string_view written, std::span<const std::string_view> names);

/// "; did you mean NAME?", or nothing.
std::string did_you_mean(std::string_view written, std::span<const std::string_view> names);

/// "one, two, three"
std::string join_names(std::span<const std::string_view> names);

}  // namespace farandole
