// The negotiator's messages: a header, then records, each begun by its tag, field by field
// (base/message.h).
//
//   member to coordinator:  OfferedHead, records      coordinator to member:  OrderedHead, records
#pragma once

#include <cstdint>
#include <vector>

#include "base/message.h"
#include "control/control_messages.h"
#include "named/negotiation_words.h"
#include "named/signature.h"

namespace farandole {

template <>
inline constexpr auto fields_of<TensorSignature> =
    Fields<Sent<&TensorSignature::dtype, kDTypes.back().dtype>,
           Sent<&TensorSignature::shape, kMostDimensions>>{};
template <>
inline constexpr auto fields_of<Signature> =
    Fields<Sent<&Signature::kind, Collective::recv>, Sent<&Signature::name, kLongestName>,
           Sent<&Signature::set>, Sent<&Signature::lasting>,
           Sent<&Signature::op, kReduceOps.back().op>, Sent<&Signature::prescale>,
           Sent<&Signature::postscale>, Sent<&Signature::root>,
           Sent<&Signature::device, kLongestDevice>, Sent<&Signature::tensors, kMostTensors>,
           Sent<&Signature::splits, kMostRanks>, Sent<&Signature::note, kLongestNote>>{};

// ---- what members say ----

struct OfferedHead {
  uint64_t seen = 0;  // the newest round that came
};
template <>
inline constexpr auto fields_of<OfferedHead> = Fields<Sent<&OfferedHead::seen>>{};

struct OfferedBits {
  static constexpr auto kTag = Offered::bits;
  uint32_t first = 0;
  std::vector<uint64_t> bits;  // bit i: id first + i
};
template <>
inline constexpr auto fields_of<OfferedBits> =
    Fields<Sent<&OfferedBits::first>, Sent<&OfferedBits::bits, kMostIds / 64>>{};

struct OfferedList {
  static constexpr auto kTag = Offered::list;
  std::vector<uint32_t> ids;
};
template <>
inline constexpr auto fields_of<OfferedList> = Fields<Sent<&OfferedList::ids, kMostIds>>{};

struct OfferedFull {
  static constexpr auto kTag = Offered::full;
  uint32_t number = 0;
  Signature signature;
};
template <>
inline constexpr auto fields_of<OfferedFull> =
    Fields<Sent<&OfferedFull::number>, Sent<&OfferedFull::signature>>{};

struct OfferedJoin {
  static constexpr auto kTag = Offered::join;
  int64_t when = 0;
};
template <>
inline constexpr auto fields_of<OfferedJoin> = Fields<Sent<&OfferedJoin::when>>{};

// ---- what the coordinator says ----

struct OrderedHead {
  uint64_t round = 0;
  bool last = false;  // of the round
};
template <>
inline constexpr auto fields_of<OrderedHead> =
    Fields<Sent<&OrderedHead::round>, Sent<&OrderedHead::last>>{};

inline constexpr size_t kOrderedHeadBytes = sizeof(uint64_t) + 1;

/// A name, by its id or by the number of an offer in full.
struct Reference {
  bool by_id = false;
  uint32_t which = 0;
};
template <>
inline constexpr auto fields_of<Reference> =
    Fields<Sent<&Reference::by_id>, Sent<&Reference::which>>{};

struct OrderedRuns {
  static constexpr auto kTag = Ordered::runs;
  std::vector<uint32_t> runs;  // first id and count of each
};
template <>
inline constexpr auto fields_of<OrderedRuns> = Fields<Sent<&OrderedRuns::runs, kMostIds>>{};

struct OrderedAgreed {
  static constexpr auto kTag = Ordered::agreed;
  Reference reference;
  uint32_t id = 0;               // kNoId: not kept
  std::vector<int64_t> extents;  // of all members
};
template <>
inline constexpr auto fields_of<OrderedAgreed> =
    Fields<Sent<&OrderedAgreed::reference>, Sent<&OrderedAgreed::id>,
           Sent<&OrderedAgreed::extents, kMostExtents>>{};

struct OrderedByProxy {
  static constexpr auto kTag = Ordered::by_proxy;
  Signature signature;
  std::vector<int64_t> extents;
};
template <>
inline constexpr auto fields_of<OrderedByProxy> =
    Fields<Sent<&OrderedByProxy::signature>, Sent<&OrderedByProxy::extents, kMostExtents>>{};

struct OrderedRefused {
  static constexpr auto kTag = Ordered::refused;
  Reference reference;
  ErrorRecord error{};
};
template <>
inline constexpr auto fields_of<OrderedRefused> =
    Fields<Sent<&OrderedRefused::reference>, Sent<&OrderedRefused::error>>{};

struct OrderedLate {
  static constexpr auto kTag = Ordered::late;
  Reference reference;
  std::vector<int> ranks;  // that have not submitted it
};
template <>
inline constexpr auto fields_of<OrderedLate> =
    Fields<Sent<&OrderedLate::reference>, Sent<&OrderedLate::ranks, kMostRanks>>{};

struct OrderedForget {
  static constexpr auto kTag = Ordered::forget;
  uint32_t id = 0;
};
template <>
inline constexpr auto fields_of<OrderedForget> = Fields<Sent<&OrderedForget::id>>{};

struct OrderedJoined {
  static constexpr auto kTag = Ordered::joined;
  int32_t last = 0;  // rank
};
template <>
inline constexpr auto fields_of<OrderedJoined> = Fields<Sent<&OrderedJoined::last>>{};

}  // namespace farandole
