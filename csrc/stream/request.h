// An operation on its way.
#pragma once

#include <atomic>
#include <optional>

#include "stream/operation.h"

namespace farandole {

/// `finished` is released after everything else has been written, and acquired by waiters.
struct Request {
  Operation operation;
  std::optional<Error> error;
  std::atomic<bool> finished{false};
  TimePoint submitted{};  // set while tracing
};

}  // namespace farandole
