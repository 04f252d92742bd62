// The functions that XLA calls.
#pragma once

#include <memory>

#include "jax/channel.h"
#include "jax/ffi.h"

namespace farandole {

/// Target "farandole_collective": a collective on all operands but the last, the token. Answers
/// with a future unless it is over at once, so that no thread of XLA waits.
ffi::Error* jax_collective(ffi::CallFrame* frame);
/// Targets "farandole_checksums" and "farandole_weights": jax/weights.h.
ffi::Error* jax_checksums(ffi::CallFrame* frame);
ffi::Error* jax_weights(ffi::CallFrame* frame);
/// Target "farandole_gradients": jax/finite.h.
ffi::Error* jax_gradients(ffi::CallFrame* frame);
/// The same on a CUDA device, complete when they return.
ffi::Error* jax_collective_on_cuda(ffi::CallFrame* frame);
ffi::Error* jax_checksums_on_cuda(ffi::CallFrame* frame);
ffi::Error* jax_weights_on_cuda(ffi::CallFrame* frame);
ffi::Error* jax_gradients_on_cuda(ffi::CallFrame* frame);
/// All targets on devices that are not supported yet: says so.
ffi::Error* jax_refusal(ffi::CallFrame* frame);

/// Where calls go from now on; a null one is nowhere.
void set_jax_channel(std::shared_ptr<JaxChannel> channel);
std::shared_ptr<JaxChannel> jax_channel();

}  // namespace farandole
