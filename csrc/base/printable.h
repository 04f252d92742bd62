// Text from programs, for people: names and reasons may hold what commands a terminal.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace farandole {

/// One line: control characters (C0, DEL, and C1 in UTF-8) as \x1b and the like. What is printable
/// stays, so twice is once.
inline std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  const auto escape = [&](unsigned char c) {
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", c);
    out += code;
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    if (c == 0xc2 && next >= 0x80 && next < 0xa0) {
      escape(static_cast<unsigned char>(next));
      ++i;
    } else if (c < 0x20 || c == 0x7f) {
      escape(c);
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace farandole
