// The contents of a call's frame, checked.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "jax/ffi.h"
#include "stream/operation.h"

namespace farandole {

/// The error for a frame that is not as it should be.
Error invalid_call(const std::string& text);

std::string_view text_of(const ffi::Attributes& all, std::string_view name);
int64_t whole_of(const ffi::Attributes& all, std::string_view name);
double factor_of(const ffi::Attributes& all, std::string_view name);
Buffer buffer_of(const ffi::Values& values, int64_t i);

}  // namespace farandole
