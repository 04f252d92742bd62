// Modules and launches. An image is a real fatbin, whose kernels are then those of the executor by
// their names, or a text: "fake image", or "bad image", which the driver's compiler refuses.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "state.h"

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

namespace {

constexpr uint32_t kFatbin = 0xba55ed50;
constexpr int kMostThreads = 1024;

template <typename Body>
int of_module(const char* name, CUmod_st* module, const Body& body) {
  return call(name, Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    if (!all.modules.contains(module) || module->context != context) {
      all.blame(std::string(name) + " of a module that is not there");
      return 400;
    }
    return body(all);
  });
}

template <typename Body>
int of_function(const char* name, CUfunc_st* function, const Body& body) {
  return of_module(name, function->module, body);
}

/// Addresses among the parameters: words that lie in what was allocated. Those in tables that the
/// kernel reads itself are not seen.
std::vector<std::pair<DevicePointer, size_t>> addresses_in(State& all, const char* kernel,
                                                           const std::vector<std::byte>& bytes) {
  std::vector<std::pair<DevicePointer, size_t>> found;
  for (size_t at = 0; at + sizeof(DevicePointer) <= bytes.size(); at += sizeof(DevicePointer)) {
    DevicePointer word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    if (all.region_of(kernel, word, 1) != nullptr) found.emplace_back(word, 1);
  }
  return found;
}

int launch(State& all, CUctx_st* context, CUfunc_st* function, Dim grid, Dim block,
           CUstream_st* stream, void** parameters) {
  const Kernel& kernel = *function->kernel;
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 || threads > kMostThreads ||
      parameters == nullptr || parameters[0] == nullptr)
    return kInvalidValue;
  const auto* const first = static_cast<const std::byte*>(parameters[0]);
  Launch launched{&kernel, grid, block, {first, first + kernel.parameter_bytes}};
  auto& [times, blocks] = all.launches[kernel.name];
  ++times;
  blocks = grid.x * grid.y * grid.z;
  const auto uses = addresses_in(all, kernel.name, launched.parameters);
  const auto work = [launched = std::move(launched)] {
    try {
      run(launched);
      return take_kernel_failure() ? 719 : kSuccess;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "kernel %s: %s\n", launched.kernel->name, error.what());
      return 719;
    }
  };
  return enqueue(all, kernel.name, context, stream, work, uses);
}

}  // namespace

FAKE_CUDA cuModuleLoadDataEx(ModuleHandle* module, const void* image, unsigned count, int* options,
                             void** values) {
  return call("cuModuleLoadDataEx", Needs::context, [&](State& all, Lock&, CUctx_st* context) {
    uint32_t magic = 0;
    std::memcpy(&magic, image, sizeof magic);
    const auto* const text = static_cast<const char*>(image);
    if (std::strncmp(text, "bad image", 9) == 0) {
      for (unsigned i = 0; i < count; ++i)
        if (options[i] == kJitErrorLog)
          std::strcpy(static_cast<char*>(values[i]), "ptxas: line 7: no such instruction");
      return 218;
    }
    if (magic != kFatbin && std::strncmp(text, "fake image", 10) != 0) return 200;
    *module = all.make<CUmod_st>();
    (*module)->context = context;
    all.modules.insert(*module);
    return kSuccess;
  });
}

FAKE_CUDA cuModuleUnload(ModuleHandle module) {
  return of_module("cuModuleUnload", module, [&](State& all) {
    all.modules.erase(module);
    return kSuccess;
  });
}

FAKE_CUDA cuModuleGetFunction(FunctionHandle* function, ModuleHandle module, const char* name) {
  return of_module("cuModuleGetFunction", module, [&](State&) {
    const Kernel* kernel = test_kernel(name);
    if (kernel == nullptr) kernel = kernel_named(name);
    if (kernel == nullptr) return kNotFound;
    std::unique_ptr<CUfunc_st>& found = module->functions[name];
    if (!found) found = std::make_unique<CUfunc_st>(CUfunc_st{kernel, module});
    *function = found.get();
    return kSuccess;
  });
}

FAKE_CUDA cuFuncLoad(FunctionHandle function) {
  return of_function("cuFuncLoad", function, [](State&) { return kSuccess; });
}

FAKE_CUDA cuFuncGetAttribute(int* value, int attribute, FunctionHandle function) {
  return of_function("cuFuncGetAttribute", function, [&](State&) {
    if (attribute != kMostThreadsOfFunction) return kInvalidValue;
    *value = kMostThreads;
    return kSuccess;
  });
}

FAKE_CUDA cuFuncGetParamInfo(FunctionHandle function, size_t index, size_t* offset, size_t* bytes) {
  return of_function("cuFuncGetParamInfo", function, [&](State&) {
    if (index != 0) return kInvalidValue;
    *offset = 0;
    *bytes = function->kernel->parameter_bytes;
    return kSuccess;
  });
}

FAKE_CUDA cuLaunchKernel(FunctionHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                         StreamHandle stream, void** parameters, void**) {
  return of_function("cuLaunchKernel", function, [&](State& all) {
    if (shared != 0) return static_cast<int>(kInvalidValue);  // no kernel has any
    return launch(all, function->module->context, function, {grid_x, grid_y, grid_z},
                  {block_x, block_y, block_z}, stream, parameters);
  });
}
