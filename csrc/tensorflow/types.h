// TensorFlow's numbers for what we have names for.
#pragma once

#include <optional>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "tensorflow/capi.h"

namespace farandole::tf {

inline constexpr int kInt32 = row(DType::int32).codes.tensorflow;
inline constexpr int kInt64 = row(DType::int64).codes.tensorflow;

constexpr std::optional<DType> dtype_of(int number) {
  return dtype_where([&](const DTypeRow& r) { return r.codes.tensorflow == number; });
}

/// As an op's definition lists them: "{half, float}".
inline std::string type_words() {
  std::string words;
  for (const DTypeRow& r : kDTypes)
    if (!r.codes.tensorflow_word.empty())
      words += (words.empty() ? "{" : ", ") + std::string(r.codes.tensorflow_word);
  return words + "}";
}

/// The class of exception that an error becomes, in Horovod's sense where it has one. Not
/// UNAVAILABLE, which TensorFlow replaces where an op is none of its own communication.
struct CodeRow {
  ErrorCode error;
  Code code;
};
inline constexpr CodeRow kCodes[] = {
    {ErrorCode::invalid_argument, kInvalidArgument},
    {ErrorCode::not_initialized, kFailedPrecondition},
    {ErrorCode::mismatch, kFailedPrecondition},
    {ErrorCode::forked, kFailedPrecondition},
    {ErrorCode::peer_lost, kUnknown},
    {ErrorCode::peer_hung, kUnknown},
    {ErrorCode::early_exit, kUnknown},
    {ErrorCode::remote_error, kUnknown},
    {ErrorCode::link, kUnknown},
    {ErrorCode::stalled, kDeadlineExceeded},
    {ErrorCode::deadlock, kDeadlineExceeded},
    {ErrorCode::resource, kResourceExhausted},
    {ErrorCode::aborted, kAborted},
};

constexpr Code code_of(ErrorCode error) {
  for (const CodeRow& row : kCodes)
    if (row.error == error) return row.code;
  return kInternal;
}

}  // namespace farandole::tf
