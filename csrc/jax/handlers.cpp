#include "jax/handlers.h"

#include <mutex>
#include <string>

#include "jax/completion_executor.h"
#include "jax/finite.h"
#include "jax/on_cuda.h"
#include "jax/weights.h"

namespace farandole {
namespace {

// ---- errors ----

struct CodeRow {
  ErrorCode ours;
  ffi::Code theirs;
};
constexpr CodeRow kCodes[] = {
    {ErrorCode::invalid_argument, ffi::Code::invalid_argument},
    {ErrorCode::mismatch, ffi::Code::invalid_argument},
    {ErrorCode::not_initialized, ffi::Code::failed_precondition},
    {ErrorCode::forked, ffi::Code::failed_precondition},
    {ErrorCode::peer_lost, ffi::Code::unavailable},
    {ErrorCode::peer_hung, ffi::Code::unavailable},
    {ErrorCode::early_exit, ffi::Code::unavailable},
    {ErrorCode::stalled, ffi::Code::deadline_exceeded},
    {ErrorCode::deadlock, ffi::Code::deadline_exceeded},
    {ErrorCode::remote_error, ffi::Code::aborted},
    {ErrorCode::aborted, ffi::Code::aborted},
    {ErrorCode::resource, ffi::Code::resource_exhausted},
};

ffi::Code code_of(ErrorCode code) {
  for (const CodeRow& row : kCodes)
    if (row.ours == code) return row.theirs;
  return ffi::Code::internal;
}

ffi::Error* failure(const ffi::Api& api, const Error& error) {
  const std::string text =
      std::string(row(error.code()).python_class) + ": " + std::string(error.what());
  ffi::ErrorCreate arguments{sizeof arguments, nullptr, text.c_str(), code_of(error.code())};
  return api.error_create(&arguments);
}

ffi::Error* refusal(const ffi::CallFrame& frame, ErrorCode code, const std::string& text,
                    const std::string& advice) {
  return failure(*frame.api, Error(code, text, {}, advice));
}

// ---- what this handler is ----

/// True when the frame only asks that.
bool introduce(const ffi::CallFrame& frame) {
  ffi::Extension* first = frame.extensions;
  if (first == nullptr || first->type != ffi::ExtensionType::metadata) return false;
  ffi::Metadata& about = *reinterpret_cast<ffi::MetadataExtension*>(first)->metadata;
  about.version = {sizeof about.version, nullptr, ffi::kMajor, ffi::kMinor};
  about.traits = 0;
  return true;
}

// ---- futures ----

/// Null when the run-time makes none.
ffi::Future* make_future(const ffi::Api& api) {
  ffi::FutureCreate arguments{offsetof(ffi::FutureCreate, future), nullptr, nullptr};
  return api.future_create(&arguments) == nullptr ? arguments.future : nullptr;
}

/// Sees the call through and tells XLA how it ended.
void complete(const ffi::Api& api, ffi::Future* future, JaxChannel& channel,
              std::shared_ptr<FusedCall> fused) {
  const std::optional<Error> error = fused->finish();
  fused.reset();  // its packs are free before the program goes on
  if (!error) {
    ffi::FutureSetAvailable arguments{sizeof arguments, nullptr, future};
    api.future_set_available(&arguments);
    return;
  }
  channel.note(*error);
  ffi::FutureSetError arguments{sizeof arguments, nullptr, future, failure(api, *error)};
  api.future_set_error(&arguments);
}

/// Launches the call. When it is over at once, returns how it ended, and makes no future.
std::optional<Error> start(ffi::CallFrame& frame, const std::shared_ptr<JaxChannel>& channel) {
  std::shared_ptr<FusedCall> fused = channel->launch(read_call(frame));
  if (!fused->is_over()) frame.future = make_future(*frame.api);
  if (frame.future == nullptr) return fused->finish();
  // The run-time's functions stay as long as the process.
  CompletionExecutor::all().send(
      [api = frame.api, future = frame.future, channel, fused]() mutable {
        complete(*api, future, *channel, std::move(fused));
      });
  return std::nullopt;
}

/// The same, and waits until it is over.
std::optional<Error> run(ffi::CallFrame& frame, const std::shared_ptr<JaxChannel>& channel) {
  return channel->launch(read_call(frame))->finish();
}

std::optional<Error> compute_checksums(ffi::CallFrame& frame, const std::shared_ptr<JaxChannel>&) {
  answer_checksums(frame);
  return std::nullopt;
}

std::optional<Error> compare_weights(ffi::CallFrame& frame, const std::shared_ptr<JaxChannel>&) {
  return answer_weights(frame);
}

std::optional<Error> tell_of_gradients(ffi::CallFrame& frame, const std::shared_ptr<JaxChannel>&) {
  return answer_gradients(frame);
}

/// Makes a handler of calls on a CUDA device from the handler of calls on the host.
template <typename Body>
auto on_cuda(const Body& body) {
  return [body](ffi::CallFrame& frame, const std::shared_ptr<JaxChannel>& channel) {
    return call_on_host(*channel->world(), frame,
                        [&](ffi::CallFrame& here) { return body(here, channel); });
  };
}

// ---- the world that calls belong to ----

struct Current {
  std::mutex mutex;  // guards channel
  std::shared_ptr<JaxChannel> channel;
};
Current& current() {
  static auto* const place = new Current;  // XLA's threads may outlive static objects
  return *place;
}

/// Answers a call with the error that `body` returns or throws, if any. The channel notes it.
template <typename Body>
ffi::Error* answer(ffi::CallFrame& frame, const Body& body) {
  if (introduce(frame)) return nullptr;
  const std::shared_ptr<JaxChannel> channel = jax_channel();
  if (!channel)
    return refusal(frame, ErrorCode::not_initialized, "farandole.jax has not been initialized",
                   "call farandole.jax.init() first");
  try {
    const std::optional<Error> error = body(frame, channel);
    if (!error) return nullptr;
    channel->note(*error);
    return failure(*frame.api, *error);
  } catch (const Error& error) {
    channel->note(error);
    return failure(*frame.api, error);
  } catch (const std::exception& error) {
    return refusal(frame, ErrorCode::internal, error.what(), "");
  }
}

}  // namespace

void set_jax_channel(std::shared_ptr<JaxChannel> channel) {
  {
    const std::lock_guard lock(current().mutex);
    current().channel.swap(channel);
  }
}  // what was there ends here, without the lock

std::shared_ptr<JaxChannel> jax_channel() {
  const std::lock_guard lock(current().mutex);
  return current().channel;
}

ffi::Error* jax_collective(ffi::CallFrame* frame) { return answer(*frame, start); }

ffi::Error* jax_checksums(ffi::CallFrame* frame) { return answer(*frame, compute_checksums); }
ffi::Error* jax_weights(ffi::CallFrame* frame) { return answer(*frame, compare_weights); }
ffi::Error* jax_gradients(ffi::CallFrame* frame) { return answer(*frame, tell_of_gradients); }

ffi::Error* jax_collective_on_cuda(ffi::CallFrame* frame) { return answer(*frame, on_cuda(run)); }
ffi::Error* jax_checksums_on_cuda(ffi::CallFrame* frame) {
  return answer(*frame, on_cuda(compute_checksums));
}
ffi::Error* jax_weights_on_cuda(ffi::CallFrame* frame) {
  return answer(*frame, on_cuda(compare_weights));
}
ffi::Error* jax_gradients_on_cuda(ffi::CallFrame* frame) {
  return answer(*frame, on_cuda(tell_of_gradients));
}

ffi::Error* jax_refusal(ffi::CallFrame* frame) {
  if (introduce(*frame)) return nullptr;
  return refusal(*frame, ErrorCode::invalid_argument,
                 "farandole.jax works on the CPU and on CUDA, and this program runs on neither",
                 "set JAX_PLATFORMS=cpu");
}

}  // namespace farandole
