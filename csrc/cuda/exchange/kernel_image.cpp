#include "cuda/exchange/kernel_image.h"

#include <dlfcn.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "cuda/driver/functions.h"

namespace farandole::cuda {
namespace {

#ifdef FARANDOLE_NVCC
std::string beside_this_module(const std::string& name) {
  Dl_info here{};
  if (::dladdr(reinterpret_cast<const void*>(&kernel_image), &here) == 0) return name;
  const std::string module = here.dli_fname;
  return module.substr(0, module.rfind('/') + 1) + name;
}

/// Throws Error(device) where it cannot be read whole.
std::vector<char> contents(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about{};
  const bool is_file = file && ::fstat(file.get(), &about) == 0 && S_ISREG(about.st_mode);
  std::vector<char> all(is_file ? static_cast<size_t>(about.st_size) : 0);
  size_t read = 0;
  for (ssize_t count = 1; count > 0 && read < all.size(); read += static_cast<size_t>(count))
    count = std::max<ssize_t>(::read(file.get(), all.data() + read, all.size() - read), 0);
  if (all.empty() || read < all.size())
    throw Error(ErrorCode::device, "the kernels of this farandole cannot be read: " + path, {},
                "install farandole anew");
  return all;
}
#endif

}  // namespace

const void* kernel_image() {
#ifdef FARANDOLE_NVCC
  static const std::vector<char> image = contents(beside_this_module(FARANDOLE_KERNELS));
  return image.data();
#else
  throw Error(ErrorCode::device,
              "this build of farandole has no kernels: it had no compiler for them");
#endif
}

KernelBuild kernel_build() {
#ifdef FARANDOLE_NVCC
  static constexpr int kCodes[] = {FARANDOLE_KERNEL_CODES};
  return {FARANDOLE_NVCC, kCodes};
#else
  return {};
#endif
}

namespace {

/// On devices of its capability's major number with the same minor number or a higher one.
bool has_code(const KernelBuild& build, int capability) {
  return std::ranges::any_of(
      build.codes, [&](int code) { return code / 10 == capability / 10 && code <= capability; });
}

std::string what_there_is(const KernelBuild& build) {
  std::string all;
  for (const int code : build.codes) all += (all.empty() ? "" : ", ") + capability_text(code);
  return "CUDA " + version_text(build.nvcc) + " has made code for " + all + " and PTX for " +
         capability_text(build.codes.front()) + " and later";
}

}  // namespace

/// Code runs with any driver of its compiler's major release or a later one; PTX takes a driver
/// that is no older than the compiler.
std::string why_not_loaded(const KernelBuild& build, int driver_version,
                           const DeviceProperties& device) {
  if (build.nvcc == 0) return "";
  const bool code = has_code(build, device.capability);
  if (!code && device.capability < build.codes.front())
    return device.label() + " has compute capability " + capability_text(device.capability) +
           ", for which this build has no kernels: " + what_there_is(build);
  if (driver_version >= build.nvcc) return "";
  const std::string is =
      "the CUDA driver is too old: it is of CUDA " + version_text(driver_version);
  const std::string by = "CUDA " + version_text(build.nvcc);
  if (driver_version / 1000 < build.nvcc / 1000)
    return is + ", and the kernels, compiled by " + by + ", need " +
           version_text(build.nvcc / 1000 * 1000);
  if (code) return "";
  return is + ", and takes no PTX by " + by + ", which is all that the kernels have for " +
         device.label();
}

}  // namespace farandole::cuda
