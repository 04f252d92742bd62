// Calls of programs that run on a CUDA device, by what answers them on the host: their arrays are
// copied there, and the results back, in XLA's stream.
#pragma once

#include <functional>
#include <optional>

#include "group/group.h"
#include "jax/ffi.h"

namespace farandole {

/// What answers a call whose arrays lie on the host, and is over when it returns.
using HostCall = std::function<std::optional<Error>(ffi::CallFrame& frame)>;

/// The thread of XLA that launches waits for what the device does before the call, and for `call`;
/// the device waits for the results alone. What fails on this rank fails the group.
std::optional<Error> call_on_host(Group& group, ffi::CallFrame& frame, const HostCall& call);

}  // namespace farandole
