// The native module's table of contents.
#include "base/version.h"
#include "bindings/bind.h"

PYBIND11_MODULE(_core, module) {
  using namespace farandole;
  module.doc() = "The native core of farandole.";
  module.attr("__version__") = version();
  bind_errors(module);
  bind_arrays(module);
  bind_mpi_port(module);
  bind_group(module);
  bind_world(module);
  bind_guarded(module);
  bind_verbs(module);
  bind_named(module);
  bind_bucket_step(module);
  bind_reducer(module);
  bind_update(module);
  bind_weights(module);
  bind_fold(module);
  bind_schedule(module);
  bind_tuner(module);
  bind_plugins(module);
  bind_watch(module);
  bind_trace(module);
  bind_jax(module);
  bind_cuda(module);
  bind_devices(module);
  bind_device_gradients(module);
}
