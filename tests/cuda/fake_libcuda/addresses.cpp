// cuGetProcAddress.
#include <cstring>
#include <sstream>

#include "state.h"

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

namespace {

struct Entry {
  const char* name;
  void* function;
  int since;
};
const Entry kEntries[] = {
#define X(name, suffix, since, arguments) \
  {"cu" #name, reinterpret_cast<void*>(&cu##name##suffix), since},
    FARANDOLE_CUDA_FUNCTIONS(X) FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
};

bool lacks(const std::string& lacking, const char* name) {
  std::istringstream in(lacking);
  for (std::string part; std::getline(in, part, ',');)
    if (part == name) return true;
  return false;
}

}  // namespace

FAKE_CUDA cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t,
                              int* status) {
  return call("cuGetProcAddress", Needs::nothing, [&](State& all, Lock&, CUctx_st*) {
    *function = nullptr;
    for (const Entry& entry : kEntries)
      if (std::strcmp(entry.name, name) == 0 && version >= entry.since &&
          all.config.version >= entry.since && !lacks(all.config.lacks, name))
        *function = entry.function;
    if (status != nullptr) *status = *function != nullptr ? 0 : 1;
    return *function != nullptr ? kSuccess : kNotFound;
  });
}
