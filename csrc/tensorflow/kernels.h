// How ops compute: asynchronously, or as a pair of ops that start and finish.
#pragma once

#include "base/plugin.h"
#include "tensorflow/capi.h"

namespace farandole::tf {

/// Null until the plug-in has been handed the table.
extern const PluginTable* engine;

/// Reads an op's attributes. Null, with a failure in `construction`, when they cannot be read.
void* create_kernel(TF_OpKernelConstruction* construction);
void delete_kernel(void* kernel);

/// No thread of TensorFlow's is held: it returns at once, and the engine's thread calls `done`.
void compute_async(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);

/// By documented calls alone. `start` returns at once with a number; `finish` takes numbers, waits
/// for their operations, and has the outputs of all.
void compute_start(void* kernel, TF_OpKernelContext* context);
void compute_finish(void* kernel, TF_OpKernelContext* context);

}  // namespace farandole::tf
