#include "cuda/nccl/nccl_functions.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>

#include "base/error.h"

namespace farandole::cuda {
namespace {

constexpr auto kSoname = "libnccl.so.2";
constexpr auto kAdvice =
    "install the wheel nvidia-nccl-cu12 (or cu13), or name the file: FARANDOLE_NCCL=PATH";

/// The library that is set by name. Else the one that a framework has loaded, then the wheel's.
void* open_somewhere(const NcclPlaces& places, std::string& why) {
  const auto open = [&](const char* file, int mode) {
    void* const handle = ::dlopen(file, RTLD_NOW | RTLD_LOCAL | mode);
    const char* const said = handle == nullptr ? ::dlerror() : nullptr;
    if (said != nullptr) why = said;
    return handle;
  };
  if (places.setting != "auto") return open(places.setting.c_str(), 0);
  if (void* const loaded = open(kSoname, RTLD_NOLOAD)) return loaded;
  if (!places.wheel.empty())
    if (void* const of_wheel = open(places.wheel.c_str(), 0)) return of_wheel;
  return open(kSoname, 0);
}

void bind(NcclLibrary& library, void* handle) {
  const auto missing = [&](const std::string& name) {
    return Error(ErrorCode::device, library.file + " is not NCCL: it has no " + name, {}, kAdvice);
  };
  // The version comes first: an old NCCL is refused for its age, not for a missing function.
  library.functions.GetVersion =
      reinterpret_cast<decltype(library.functions.GetVersion)>(::dlsym(handle, "ncclGetVersion"));
  if (library.functions.GetVersion == nullptr) throw missing("ncclGetVersion");
  if (library.functions.GetVersion(&library.version) != kNcclSuccess)
    throw Error(ErrorCode::device, library.file + " does not say which NCCL it is");
  if (library.version < kOldestNccl)
    throw Error(ErrorCode::device,
                "NCCL is too old: " + library.file + " is " + nccl_version_text(library.version) +
                    ", and only from " + nccl_version_text(kOldestNccl) +
                    " on does it let go of a rank that is lost",
                {}, kAdvice);
#define X(name, arguments)                                                               \
  library.functions.name =                                                               \
      reinterpret_cast<decltype(library.functions.name)>(::dlsym(handle, "nccl" #name)); \
  if (library.functions.name == nullptr) throw missing("nccl" #name);
  FARANDOLE_NCCL_FUNCTIONS(X)
#undef X
  library.functions.GetLastError = reinterpret_cast<decltype(library.functions.GetLastError)>(
      ::dlsym(handle, "ncclGetLastError"));
}

struct OfProcess {
  std::mutex mutex;  // guards the rest
  NcclPlaces places{"auto", ""};
  std::optional<NcclLibrary> found;
};

OfProcess& of_this_process() {
  static auto* const one = new OfProcess;
  return *one;
}

}  // namespace

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

NcclLibrary NcclLibrary::open(const NcclPlaces& places) {
  if (places.setting == "off") throw Error(ErrorCode::device, "FARANDOLE_NCCL=off");
  std::string why;
  void* const handle = open_somewhere(places, why);
  if (handle == nullptr) {
    Context where;
    where.evidence = why;
    const bool named = places.setting != "auto";
    throw Error(ErrorCode::device,
                "there is no NCCL: " + (named ? places.setting : std::string(kSoname)) +
                    " cannot be opened",
                where, kAdvice);
  }
  NcclLibrary library;
  library.file = places.setting != "auto" ? places.setting : kSoname;
  Dl_info info{};
  if (void* const symbol = ::dlsym(handle, "ncclGetVersion"))
    if (::dladdr(symbol, &info) != 0 && info.dli_fname != nullptr) library.file = info.dli_fname;
  bind(library, handle);
  return library;
}

void NcclLibrary::look_in(NcclPlaces places) {
  const std::lock_guard lock(of_this_process().mutex);
  of_this_process().places = std::move(places);
}

const NcclLibrary& NcclLibrary::of_process() {
  OfProcess& all = of_this_process();
  const std::lock_guard lock(all.mutex);
  if (!all.found) all.found = open(all.places);
  return *all.found;
}

}  // namespace farandole::cuda
