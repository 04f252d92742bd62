// The tags of the negotiator's messages. The fields that follow each tag are in
// named/negotiation_messages.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

enum class Offered : uint8_t {
  bits,  // ids, as bits of a range of them
  list,  // ids
  full,  // a name or description that is new
  join,
};

enum class Ordered : uint8_t {
  runs,    // ids, in order
  agreed,  // a name that was offered, with what is new about it
  by_proxy,
  refused,
  late,  // the ranks that have not submitted it
  forget,
  joined,
};

inline constexpr size_t kFullMessage = 256 << 10;  // bytes from which on a message is sent
inline constexpr size_t kMostIds = 1 << 24;
inline constexpr size_t kMostExtents = 1 << 24;

}  // namespace farandole
