// Completion of one operation, shared between the engine and the waiting thread.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "stream/request.h"

namespace farandole {

class Engine;

class Handle {
 public:
  Handle() = default;
  Handle(std::shared_ptr<Engine> engine, std::shared_ptr<Request> request)
      : engine_(std::move(engine)), request_(std::move(request)) {}

  /// False for a handle of nothing, which is complete.
  bool valid() const noexcept { return request_ != nullptr; }
  bool done() const noexcept {
    return !request_ || request_->finished.load(std::memory_order_acquire);
  }
  /// Drives the engine until the operation is complete; false when `until` passed first.
  /// Throws the operation's error.
  bool wait(Deadline until = {}) const;
  /// The error of a finished operation, without throwing.
  const Error* error() const {
    return done() && request_ && request_->error ? &*request_->error : nullptr;
  }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Request> request_;
};

/// Drives until all are complete, also after an error: those that follow work on memory that their
/// owner takes back. False when `until` passed first. The first error goes to `first`, unless one
/// stands there.
bool wait_for_all(std::span<const Handle> handles, Deadline until, std::optional<Error>& first);

}  // namespace farandole
