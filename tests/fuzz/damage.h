// Shared by the fuzzers: damage that the input selects, and the errors that may answer it.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/error.h"

namespace farandole::fuzz {

using Bytes = std::vector<std::byte>;

/// Mostly returns the message unchanged: code behind a refused message would never be reached.
inline Bytes damaged(Bytes message, FuzzedDataProvider& input) {
  const auto place = [&] { return input.ConsumeIntegralInRange<size_t>(0, message.size() - 1); };
  switch (input.ConsumeIntegralInRange<int>(0, 31)) {
    case 0:
      if (!message.empty()) message[place()] = std::byte{input.ConsumeIntegral<uint8_t>()};
      break;
    case 1:
      if (!message.empty()) message.resize(place());
      break;
    case 2:
      message.push_back(std::byte{input.ConsumeIntegral<uint8_t>()});
      break;
    case 3:
      if (!message.empty()) std::rotate(message.begin(), message.begin() + 1, message.end());
      break;
    case 4: {
      const auto other = input.ConsumeBytes<uint8_t>(input.ConsumeIntegralInRange<size_t>(0, 64));
      message.resize(other.size());
      std::ranges::transform(other, message.begin(), [](uint8_t b) { return std::byte{b}; });
      break;
    }
    default:
      break;
  }
  return message;
}

/// Runs `body`. Returns true on an error about a message; any other error is a fault.
template <typename Body>
bool refused(Body body) {
  try {
    body();
    return false;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::link && error.code() != ErrorCode::resource) throw;
    return true;
  }
}

}  // namespace farandole::fuzz
