// Messages by which ranks agree on an operation (stream/message_agreement.h), field by field
// (base/message.h).
#pragma once

#include <cstdint>

#include "base/message.h"
#include "stream/descriptor.h"

namespace farandole {

inline constexpr size_t kMostBundled = 1 << 20;  // arrays

/// The operation that this rank and those before it have started. The length in bytes of each one's
/// data follows, then the data.
struct StartedMessage {
  uint64_t ticket = 0;
  bool differs = false;  // among them already
};
template <>
inline constexpr auto fields_of<StartedMessage> =
    Fields<Sent<&StartedMessage::ticket>, Sent<&StartedMessage::differs>>{};

template <>
inline constexpr auto fields_of<CollectiveSpec> =
    Fields<Sent<&CollectiveSpec::kind, Collective::recv>,
           Sent<&CollectiveSpec::op, kReduceOps.back().op>, Sent<&CollectiveSpec::prescale>,
           Sent<&CollectiveSpec::postscale>, Sent<&CollectiveSpec::root>>{};
template <>
inline constexpr auto fields_of<Descriptor> =
    Fields<Sent<&Descriptor::spec>, Sent<&Descriptor::dtype, kDTypes.back().dtype>,
           Sent<&Descriptor::level, Determinism::canonical>, Sent<&Descriptor::on_devices>,
           Sent<&Descriptor::count>, Sent<&Descriptor::piece>, Sent<&Descriptor::arrays>,
           Sent<&Descriptor::algorithm>, Sent<&Descriptor::name>, Sent<&Descriptor::counts>>{};
template <>
inline constexpr auto fields_of<BundledArray> =
    Fields<Sent<&BundledArray::count>, Sent<&BundledArray::counts>, Sent<&BundledArray::options>,
           Sent<&BundledArray::dtype, kDTypes.back().dtype>,
           Sent<&BundledArray::kind, Collective::recv>>{};

/// Sent where members disagree: their number, then so many of these.
template <>
inline constexpr auto fields_of<Shown> =
    Fields<Sent<&Shown::descriptor>, Sent<&Shown::arrays, kMostBundled>>{};

}  // namespace farandole
