// The table of C functions that a plug-in is handed when it is loaded, and nothing else: one engine
// a process, no symbol looked up in another library of ours, no C++ type across the border.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

extern "C" {

/// One tensor of an operation by name. Without output: the engine asks for room for the result
/// once its shape is known (all_gather, all_to_all).
struct PluginTensor {
  void* input;
  void* output;
  int32_t dtype;  // a DType
  int32_t dimensions;
  const int64_t* shape;  // of the input
};

/// How an operation ended. Refers to memory that lasts for the call alone.
struct PluginResult {
  int32_t failed;           // 0, else 1 + an ErrorCode
  const char* error;        // what() of the Error; null when it has not failed
  const int64_t* received;  // all_to_all: rows that came from each member
  size_t received_count;
  int32_t number;  // join: the last rank to join; step: 1 if its weights are compared
};

/// The request for an operation by name (named/request.h says more). Refers to the caller's memory:
/// the buffers are lent until `finished`, everything else for the call alone.
struct PluginAsk {
  /// A Collective by name; null: join. "step": a barrier that begins a step of the model `root`,
  /// which compares weights every `prescale` steps. "weights": compares the tensors, that model's;
  /// the note has the name of the step that it is a part of, a line of a program that makes them
  /// equal, and each one's name.
  const char* kind;
  const char* name;
  size_t name_bytes;
  const char* note;  // compared between ranks, line by line
  size_t note_bytes;
  uint32_t set;
  int32_t op;  // a ReduceOp
  double prescale, postscale;
  int32_t root;
  const PluginTensor* tensors;
  size_t tensor_count;
  const int64_t* splits;
  size_t split_count;

  void* user;
  /// Memory for the result of tensor `i`, of the tensor's dtype; null: there is none left. By the
  /// thread that drives the engine: it must not wait.
  void* (*make_room)(void* user, size_t i, const int64_t* shape, size_t dimensions);
  /// Exactly once, perhaps before submit() returns, and by any thread: it must not wait.
  void (*finished)(void* user, const PluginResult* result);
};

struct PluginTable {
  uint32_t version;
  uint32_t bytes;
  /// Puts an operation on its way. `wait`: the caller drives it to its end, so that `finished` has
  /// been called when this returns.
  void (*submit)(const PluginAsk* ask, int32_t wait);
  /// How many ranks a set has, and which of them this one is; 0 when it may not use the set.
  int32_t (*members)(uint32_t set, int32_t* place);
};

}  // extern "C"

inline constexpr uint32_t kPluginVersion = 2;

}  // namespace farandole
