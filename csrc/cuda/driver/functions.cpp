#include "cuda/driver/functions.h"

#include <dlfcn.h>

#include "base/error.h"

namespace farandole::cuda {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

bool DriverFunctions::have_virtual_memory() const {
  return MemAddressReserve != nullptr && MemAddressFree != nullptr && MemCreate != nullptr &&
         MemRelease != nullptr && MemMap != nullptr && MemUnmap != nullptr &&
         MemSetAccess != nullptr && MemExportToShareableHandle != nullptr &&
         MemImportFromShareableHandle != nullptr && MemGetAllocationGranularity != nullptr;
}

DriverFunctions bind_functions(const FindFunction& find) {
  DriverFunctions functions;
  std::string missing;
#define X(name, suffix, since, arguments)                                                      \
  functions.name =                                                                             \
      reinterpret_cast<decltype(functions.name)>(find("cu" #name, "cu" #name #suffix, since)); \
  if (functions.name == nullptr)                                                               \
    missing += std::string(missing.empty() ? "" : "; ") +                                      \
               "it has no cu" #name #suffix ", which drivers have from CUDA " +                \
               version_text(since) + " on";
  FARANDOLE_CUDA_FUNCTIONS(X)
#undef X
#define X(name, suffix, since, arguments) \
  functions.name =                        \
      reinterpret_cast<decltype(functions.name)>(find("cu" #name, "cu" #name #suffix, since));
  FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
  if (!missing.empty())
    throw Error(ErrorCode::device, "the CUDA driver's library is not complete: " + missing, {},
                "install NVIDIA's own driver, or remove what stands in for its library");
  return functions;
}

DriverLibrary::DriverLibrary(const std::string& file)
    : handle_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) {
    Context where;
    if (const char* said = ::dlerror()) where.evidence = said;
    throw Error(ErrorCode::device, "there is no CUDA driver: " + file + " cannot be opened", where,
                "install NVIDIA's driver; in a container, start it with access to the GPU");
  }
  get_address_ = reinterpret_cast<decltype(get_address_)>(::dlsym(handle_, "cuGetProcAddress_v2"));
}

void* DriverLibrary::find(const char* name, const char* symbol, int since) const {
  void* found = nullptr;
  // Its last argument says why not; whatever the reason, the symbol is tried next.
  if (get_address_ != nullptr && get_address_(name, &found, since, 0, nullptr) == 0 &&
      found != nullptr)
    return found;
  return ::dlsym(handle_, symbol);
}

}  // namespace farandole::cuda
