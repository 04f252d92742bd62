#include "tensorflow/capi.h"

#include <dlfcn.h>

namespace farandole::tf {

Api api;

std::string bind() {
  // It is in the process already, and is found by its name alone.
  void* library = ::dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = RTLD_DEFAULT;
  std::string missing;
#define X(name, result, arguments)                                                 \
  api.name = reinterpret_cast<result(*) arguments>(::dlsym(library, "TF_" #name)); \
  if (api.name == nullptr) missing += " TF_" #name;
  FARANDOLE_TF_FUNCTIONS(X)
#undef X
  return missing.empty() ? "" : "this TensorFlow lacks functions of its C API:" + missing;
}

}  // namespace farandole::tf
