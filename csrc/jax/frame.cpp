#include "jax/frame.h"

#include <optional>

namespace farandole {
namespace {

std::optional<DType> dtype_of(ffi::ElementType number) {
  return dtype_where(
      [&](const DTypeRow& r) { return static_cast<ffi::ElementType>(r.codes.xla) == number; });
}

// ---- attributes ----

const void* attribute(const ffi::Attributes& all, std::string_view name, ffi::AttributeType type) {
  for (int64_t i = 0; i < all.size; ++i) {
    const ffi::Text& have = *all.names[i];
    if (std::string_view(have.data, have.size) != name) continue;
    if (all.types[i] == type) return all.values[i];
    break;
  }
  throw invalid_call("the call lacks attribute '" + std::string(name) +
                     "', or it is of another type");
}

template <typename T>
T number(const ffi::Attributes& all, std::string_view name, DType dtype) {
  const auto* value =
      static_cast<const ffi::Scalar*>(attribute(all, name, ffi::AttributeType::scalar));
  if (dtype_of(value->dtype) != dtype)
    throw invalid_call("attribute '" + std::string(name) + "' is no " +
                       std::string(name_of(dtype)));
  return *static_cast<const T*>(value->value);
}

}  // namespace

Error invalid_call(const std::string& text) { return Error(ErrorCode::invalid_argument, text); }

std::string_view text_of(const ffi::Attributes& all, std::string_view name) {
  const auto* value =
      static_cast<const ffi::Text*>(attribute(all, name, ffi::AttributeType::string));
  return {value->data, value->size};
}

int64_t whole_of(const ffi::Attributes& all, std::string_view name) {
  return number<int64_t>(all, name, DType::int64);
}

double factor_of(const ffi::Attributes& all, std::string_view name) {
  return number<double>(all, name, DType::float64);
}

Buffer buffer_of(const ffi::Values& values, int64_t i) {
  if (values.types[i] != ffi::ValueType::buffer) throw invalid_call("an operand is no array");
  const auto& given = *static_cast<const ffi::Buffer*>(values.values[i]);
  const std::optional<DType> dtype = dtype_of(given.dtype);
  if (!dtype)
    throw invalid_call("array " + std::to_string(i) + " is of XLA's element type " +
                       std::to_string(given.dtype) + ", which is not supported");
  size_t count = 1;
  for (int64_t d = 0; d < given.rank; ++d) count *= static_cast<size_t>(given.dims[d]);
  return {static_cast<std::byte*>(given.data), count, *dtype};
}

}  // namespace farandole
