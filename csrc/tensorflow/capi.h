// Our own declarations of the functions of TensorFlow's C API that we use, bound when we are loaded
// into a process that has TensorFlow: one binary for all of its versions, and none at build time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" {
struct TF_Status;
struct TF_Tensor;
struct TF_OpKernelContext;
struct TF_OpKernelConstruction;
struct TF_KernelBuilder;
struct TF_AsyncOpKernelDoneCallback;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
}

namespace farandole::tf {

using CreateKernel = void* (*)(TF_OpKernelConstruction*);
using Compute = void (*)(void*, TF_OpKernelContext*);
using ComputeAsync = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteKernel = void (*)(void*);
using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// TensorFlow documents each in tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h. Its enumerations
// are int here.
#define FARANDOLE_TF_FUNCTIONS(X)                                                               \
  X(NewStatus, TF_Status*, ())                                                                  \
  X(DeleteStatus, void, (TF_Status*))                                                           \
  X(SetStatus, void, (TF_Status*, int, const char*))                                            \
  X(GetCode, int, (const TF_Status*))                                                           \
  X(Message, const char*, (const TF_Status*))                                                   \
  X(AllocateTensor, TF_Tensor*, (int, const int64_t*, int, size_t))                             \
  X(DeleteTensor, void, (TF_Tensor*))                                                           \
  X(TensorData, void*, (const TF_Tensor*))                                                      \
  X(TensorType, int, (const TF_Tensor*))                                                        \
  X(TensorElementCount, int64_t, (const TF_Tensor*))                                            \
  X(NumDims, int, (const TF_Tensor*))                                                           \
  X(Dim, int64_t, (const TF_Tensor*, int))                                                      \
  X(NumInputs, int, (TF_OpKernelContext*))                                                      \
  X(NumOutputs, int, (TF_OpKernelContext*))                                                     \
  X(GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                        \
  X(SetOutput, void, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                  \
  X(AllocateOutput, TF_Tensor*,                                                                 \
    (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*))                   \
  X(ForwardInputOrAllocateOutput, TF_Tensor*,                                                   \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))         \
  X(StepId, int64_t, (TF_OpKernelContext*))                                                     \
  X(GetIterId, int64_t, (TF_OpKernelContext*))                                                  \
  X(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                           \
  X(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                 \
  X(OpKernelConstruction_GetAttrSize, void,                                                     \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                    \
  X(OpKernelConstruction_GetAttrString, void,                                                   \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))                         \
  X(OpKernelConstruction_GetAttrInt64, void,                                                    \
    (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))                              \
  X(RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                        \
  X(NewKernelBuilder, TF_KernelBuilder*,                                                        \
    (const char*, const char*, CreateKernel, Compute, DeleteKernel))                            \
  X(NewAsyncKernelBuilder, TF_KernelBuilder*,                                                   \
    (const char*, const char*, CreateKernel, ComputeAsync, DeleteKernel))                       \
  X(KernelBuilder_HostMemory, void, (TF_KernelBuilder*, const char*))                           \
  X(RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                  \
  X(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                             \
  X(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                   \
  X(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                  \
  X(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                 \
  X(OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                    \
  X(OpDefinitionBuilderSetShapeInferenceFunction, void, (TF_OpDefinitionBuilder*, InferShapes)) \
  X(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                          \
  X(NewShapeHandle, TF_ShapeHandle*, ())                                                        \
  X(DeleteShapeHandle, void, (TF_ShapeHandle*))                                                 \
  X(ShapeInferenceContextNumInputs, int64_t, (TF_ShapeInferenceContext*))                       \
  X(ShapeInferenceContextGetInput, void,                                                        \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                              \
  X(ShapeInferenceContextSetOutput, void,                                                       \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                              \
  X(ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))

/// The functions, without the TF_ of their names; null until bind() has found them.
struct Api {
#define X(name, result, arguments) result(*name) arguments = nullptr;
  FARANDOLE_TF_FUNCTIONS(X)
#undef X
};
extern Api api;

/// Finds all of them in this process. Returns an error, or an empty text.
std::string bind();

/// TF_Code, as far as our errors become it.
enum Code : int {
  kOk = 0,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kInternal = 13,
};

/// A status of TensorFlow's, for the length of a scope.
class Status {
 public:
  Status() : status_(api.NewStatus()) {}
  Status(int code, const char* message) : Status() { api.SetStatus(status_, code, message); }
  ~Status() { api.DeleteStatus(status_); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  operator TF_Status*() const { return status_; }
  bool ok() const { return api.GetCode(status_) == kOk; }
  const char* message() const { return api.Message(status_); }

 private:
  TF_Status* status_;
};

}  // namespace farandole::tf
