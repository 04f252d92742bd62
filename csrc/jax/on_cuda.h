// Calls of programs that run on a CUDA device, answered on the host: their arrays are copied
// there, and the results back, in XLA's stream.
#pragma once

#include <functional>
#include <optional>

#include "group/group.h"
#include "jax/ffi.h"

namespace farandole {

/// Answers a call whose arrays lie on the host. The call is over when it returns.
using HostCall = std::function<std::optional<Error>(ffi::CallFrame& frame)>;

/// XLA's launching thread waits for the device's work before the call, and for `call`; the device
/// waits for the results alone. A failure on this rank fails the group.
std::optional<Error> call_on_host(Group& group, ffi::CallFrame& frame, const HostCall& call);

}  // namespace farandole
