// XLA's foreign function interface as a handler sees it, version 0.1: our own declarations of what
// handlers touch, so that neither building nor running needs XLA's headers. A run-time takes
// handlers of its own version and older ones; structs only ever grow at their end.
//
//   XLA ──CallFrame──► Handler ──► nullptr: done, or `future` was set and will be completed later
//                              └─► Error*: failed
//
// tests/frameworks/test_jax_abi.py compares sizes and offsets with an installed jaxlib's headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole::ffi {

inline constexpr int kMajor = 0, kMinor = 1;

// ---- what the run-time owns ----

struct Error;
struct Future;
struct Context;

// ---- extensions: a call frame with this one asks what the handler is, and is no call ----

enum class ExtensionType : int { metadata = 1 };

struct Extension {
  size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major, minor;  // out
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;  // newer versions go on here, with what they have preset themselves
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

// ---- the call ----

/// Numbers are XLA's; csrc/jax/call.cpp has those that we know.
using ElementType = int;

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  ElementType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Text {
  const char* data;
  size_t size;
};

struct Scalar {
  ElementType dtype;
  void* value;
};

enum class ValueType : int { buffer = 1 };
enum class AttributeType : int { array = 1, dictionary = 2, scalar = 3, string = 4 };
enum class Stage : int { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

/// Arguments, or results.
struct Values {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  ValueType* types;
  void** values;  // Buffer*
};

/// Strings are Text*, scalars are Scalar*.
struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  AttributeType* types;
  Text** names;
  void** values;
};

struct Api;

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  Stage stage;
  Values arguments;
  Values results;
  Attributes attributes;
  Future* future;  // out; memory of the call stays the handler's until it is completed
};

using Handler = Error*(CallFrame*);

// ---- what a handler may call ----

enum class Code : int {
  cancelled = 1,
  unknown = 2,
  invalid_argument = 3,
  deadline_exceeded = 4,
  resource_exhausted = 8,
  failed_precondition = 9,
  aborted = 10,
  unimplemented = 12,
  internal = 13,
  unavailable = 14,
};

struct ErrorCreate {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  Code code;
};

struct ErrorDestroy {
  size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct StreamGet {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out; a CUstream where the program runs on CUDA
};

struct FutureCreate {
  size_t struct_size;
  Extension* extensions;
  Future* future;  // out
};

struct FutureSetAvailable {
  size_t struct_size;
  Extension* extensions;
  Future* future;
};

struct FutureSetError {
  size_t struct_size;
  Extension* extensions;
  Future* future;
  Error* error;  // becomes the run-time's
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* error_get_message;
  void (*error_destroy)(ErrorDestroy*);
  void* handler_register;
  Error* (*stream_get)(StreamGet*);
  void* others[8];  // about types, contexts, state, device memory, threads
  Error* (*future_create)(FutureCreate*);
  Error* (*future_set_available)(FutureSetAvailable*);
  Error* (*future_set_error)(FutureSetError*);
};

}  // namespace farandole::ffi
