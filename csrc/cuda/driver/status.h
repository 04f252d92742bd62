// The meaning of the driver's error codes: a kind of error, a sentence and an advice for each.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "cuda/driver/functions.h"

namespace farandole::cuda {

/// The codes that have branches of their own.
inline constexpr DriverCode kSuccess = 0;
inline constexpr DriverCode kInvalidValue = 1;
inline constexpr DriverCode kOutOfMemory = 2;
inline constexpr DriverCode kDeinitialized = 4;
inline constexpr DriverCode kNoDevice = 100;
inline constexpr DriverCode kInvalidDevice = 101;
inline constexpr DriverCode kNotFound = 500;
inline constexpr DriverCode kNotReady = 600;
inline constexpr DriverCode kNotSupported = 801;

/// `lasting`: the context (or the driver) works no more: every later call fails as well.
struct StatusRow {
  DriverCode code;
  std::string_view name;
  ErrorCode kind;
  bool lasting;
  std::string_view meaning;
  std::string_view advice;
};
std::span<const StatusRow> status_rows();

/// Null for a code that only newer drivers have.
const StatusRow* find_status(DriverCode code);
bool is_lasting(DriverCode code);

/// `call`: the function; `tried`: what for, as in "cannot ...". `said`: more evidence.
Error status_error(const DriverFunctions& functions, DriverCode code, std::string_view call,
                   std::string_view tried, std::string_view said = {});

}  // namespace farandole::cuda
