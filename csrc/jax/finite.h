// Gradients that are not finite on some rank, in programs compiled by XLA: a call that runs only in
// such a step, and tells whoever has asked to be told.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "jax/ffi.h"

namespace farandole {

/// What a program knows of its gradients in such a step.
struct GradientSums {
  std::string label, names;  // of all of them, and a line for each
  std::string ranks;         // the key of their process set
  std::vector<float> sums;   // this rank's: not finite where a number of the gradient is not
};

/// Returns the error that ends the program, if one does. By any thread.
using GradientJudge = std::function<std::optional<Error>(const GradientSums&)>;

/// Who is told from now on.
void set_gradient_judge(GradientJudge judge);

/// Operands: the number that some rank has raised, and the sums. Attributes: `label`, `names` and
/// `ranks`.
std::optional<Error> answer_gradients(const ffi::CallFrame& frame);

}  // namespace farandole
