// TensorFlow's numbers for what we have names for.
#pragma once

#include <array>
#include <optional>

#include "base/dtype.h"
#include "base/error.h"
#include "tensorflow/capi.h"

namespace farandole::tf {

struct TypeRow {
  DType dtype;
  int number;  // TF_DataType
};
inline constexpr std::array<TypeRow, 13> kTypes{{
    {DType::float16, 19},
    {DType::bfloat16, 14},
    {DType::float32, 1},
    {DType::float64, 2},
    {DType::int8, 6},
    {DType::int16, 5},
    {DType::int32, 3},
    {DType::int64, 9},
    {DType::uint8, 4},
    {DType::uint16, 17},
    {DType::uint32, 22},
    {DType::uint64, 23},
    {DType::boolean, 10},
}};
inline constexpr int kInt32 = 3, kInt64 = 9;
/// As an op's definition lists them.
inline constexpr const char* kTypeNames =
    "{half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32, uint64, "
    "bool}";

constexpr std::optional<DType> dtype_of(int number) {
  for (const TypeRow& row : kTypes)
    if (row.number == number) return row.dtype;
  return std::nullopt;
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
