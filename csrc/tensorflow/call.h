// One operation of a graph on its way: its tensors, lent to the engine until it has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/plugin.h"
#include "base/reduce_op.h"
#include "tensorflow/capi.h"

namespace farandole::tf {

/// The attributes of an op; the same for all of its runs.
struct Kernel {
  std::string kind;  // a collective, "join", "step" or "weights" (base/plugin.h)
  std::string name, note;
  uint32_t set = 0;
  ReduceOp op = ReduceOp::sum;
  double prescale = 1, postscale = 1;
  int root = 0;
  bool waits = false;  // the thread that computes it waits for its end: eager mode
};

/// How a call failed, if it did.
struct Failure {
  Code code = kOk;
  std::string message;
};

class Call {
 public:
  using Done = std::function<void(Call&)>;

  explicit Call(const Kernel& kernel) : kernel_(&kernel) {}
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// Takes the context's inputs. With `in_place` the outputs are the context's, made of the inputs
  /// where nobody else has them; it must live until `done`. Else they are memory of their own, and
  /// the context may go.
  void prepare(TF_OpKernelContext* context, bool in_place);
  /// Before its op may go without having been started.
  void keep_kernel() { kernel_ = &own_kernel_.emplace(*kernel_); }
  /// Puts it on its way; calls `done` once, perhaps at once. `wait`: before it returns.
  void start(const PluginTable& table, bool wait, Done done);

  const Failure& failure() const { return failure_; }
  /// Hands outputs that are memory of their own to a context, from its output `first` on; how many.
  int give_outputs(TF_OpKernelContext* context, int first);
  /// Says in the context how it failed, if it did.
  void report(TF_OpKernelContext* context) const;
  /// A key that no two operations in flight share: a name is of one kind, in one set.
  const std::string& key() const { return key_; }

 private:
  struct Shaped {
    TF_Tensor* input = nullptr;   // null: the context keeps it
    void* data = nullptr;         // of the input
    TF_Tensor* output = nullptr;  // null: there is none yet
    std::vector<int64_t> shape;   // of the input
    int type = 0;
  };
  void fail(Code code, std::string message);
  void take_tensor(TF_OpKernelContext* context, int i);
  void take_splits(TF_OpKernelContext* context, int i);
  void split_evenly();
  void make_outputs();
  TF_Tensor* make_output(int i, std::span<const int64_t> shape, int type, bool forward = false);
  void make_extra(const PluginResult& result);
  void finish(const PluginResult& result);
  void end();

  static void* room_made(void* call, size_t i, const int64_t* shape, size_t dimensions);
  static void ended(void* call, const PluginResult* result);

  const Kernel* kernel_;  // gone when the call outlives its op: after start()
  std::optional<Kernel> own_kernel_;
  enum class Extra : uint8_t { none, received, number } extra_is_ = Extra::none;
  TF_OpKernelContext* context_ = nullptr;  // null: outputs are memory of their own
  std::string name_, key_;
  std::vector<Shaped> tensors_;
  std::vector<int64_t> splits_;
  TF_Tensor* extra_ = nullptr;  // the output besides: received splits, or a number
  const PluginTable* table_ = nullptr;
  Failure failure_;
  Done done_;
};

}  // namespace farandole::tf
