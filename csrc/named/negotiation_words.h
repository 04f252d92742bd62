// The layout of the negotiator's messages: a header, then records, each begun by its tag.
//
//   member to coordinator:  seen (u64), records        coordinator to member:  round (u64),
//                                                      last of the round (u8), records
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

enum class Offered : uint8_t {
  bits,  // first id (u32), list of u64: bit i of the list is id first + i
  list,  // list of ids (u32)
  full,  // number (u32), signature
  join,
};

/// A reference is one byte (1: an id, 0: the number of an offer in full) and a u32.
enum class Ordered : uint8_t {
  runs,      // list of (first id, count)
  agreed,    // reference, id (kNoId: not kept), extents of all members
  by_proxy,  // signature, extents of all members
  refused,   // reference, ErrorRecord
  late,      // reference, list of ranks (i32)
  forget,    // id
  joined,    // the last rank (i32)
};

inline constexpr size_t kFullMessage = 256 << 10;  // bytes from which on a message is sent
inline constexpr size_t kMostIds = 1 << 24;
inline constexpr size_t kMostExtents = 1 << 24;

}  // namespace farandole
