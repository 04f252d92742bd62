// How long something took, for people.
#pragma once

#include <cstdio>
#include <string>

#include "base/clock.h"

namespace farandole {

/// "12.3 s"
inline std::string seconds_text(Duration d) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds(d));
  return text;
}

}  // namespace farandole
