#include "cuda/driver/module.h"

#include <array>
#include <bit>
#include <map>
#include <mutex>
#include <utility>

namespace farandole::cuda {

namespace {

/// By context and image. The caller that finds a module there has its context, too.
using Modules =
    std::map<std::pair<const DeviceContext*, const void*>, std::weak_ptr<const DeviceModule>>;

}  // namespace

std::shared_ptr<const DeviceModule> DeviceModule::load(std::shared_ptr<const DeviceContext> context,
                                                       const void* image) {
  static std::mutex mutex;  // guards them
  static auto* const modules = new Modules;
  const std::lock_guard lock(mutex);
  std::weak_ptr<const DeviceModule>& known = (*modules)[{context.get(), image}];
  std::shared_ptr<const DeviceModule> module = known.lock();
  if (!module) {
    module.reset(new DeviceModule(std::move(context), image));
    known = module;
  }
  return module;
}

DeviceModule::DeviceModule(std::shared_ptr<const DeviceContext> context, const void* image)
    : context_(std::move(context)) {
  std::array<char, 4096> said{};
  std::array<int, 2> options{kJitErrorLog, kJitErrorLogBytes};
  std::array<void*, 2> values{said.data(), std::bit_cast<void*>(said.size() - 1)};
  const DeviceContext::Use driver(*context_);
  const DriverCode code =
      driver->ModuleLoadDataEx(&handle_, image, options.size(), options.data(), values.data());
  context_->check(code, "cuModuleLoadDataEx", "load the kernels", said.data());
}

DeviceModule::~DeviceModule() {
  context_->at_end("cuModuleUnload",
                   [&](const auto& driver) { return driver.ModuleUnload(handle_); });
}

DeviceFunction DeviceModule::function(const std::string& name) const {
  return {shared_from_this(), name};
}

DeviceFunction::DeviceFunction(std::shared_ptr<const DeviceModule> module, std::string name)
    : module_(std::move(module)), name_(std::move(name)) {
  const DeviceContext& context = module_->context();
  const DeviceContext::Use driver(context);
  const auto tried = [&] { return "load the kernel " + name_; };
  context.check(driver->ModuleGetFunction(&handle_, module_->handle(), name_.c_str()),
                "cuModuleGetFunction", tried);
  if (driver->FuncLoad != nullptr) context.check(driver->FuncLoad(handle_), "cuFuncLoad", tried);
  int threads = 0;  // older drivers load what they are asked about
  context.check(driver->FuncGetAttribute(&threads, kMostThreadsOfFunction, handle_),
                "cuFuncGetAttribute", tried);
  most_threads_ = static_cast<uint32_t>(threads);
  size_t offset = 0;
  if (driver->FuncGetParamInfo != nullptr)
    context.check(driver->FuncGetParamInfo(handle_, 0, &offset, &parameter_bytes_),
                  "cuFuncGetParamInfo", tried);
}

void DeviceFunction::launch_with(const StreamRef& stream, const LaunchShape& shape,
                                 const void* parameters, size_t bytes) const {
  // A kernel of another build would read past the struct, or use half of it.
  if (parameter_bytes_ != 0 && parameter_bytes_ != bytes)
    throw Error(ErrorCode::internal, "the kernel " + name_ + " takes " +
                                         std::to_string(parameter_bytes_) + " bytes, not " +
                                         std::to_string(bytes));
  if (shape.threads == 0 || shape.threads > most_threads_ || shape.blocks == 0)
    throw Error(ErrorCode::internal, "the kernel " + name_ + " in " + std::to_string(shape.blocks) +
                                         " blocks of " + std::to_string(shape.threads) +
                                         " threads, of which it has " +
                                         std::to_string(most_threads_) + " at most");
  // The driver copies as many bytes as the kernel takes.
  std::array<void*, 1> values{const_cast<void*>(parameters)};
  const DeviceContext& context = module_->context();
  const DeviceContext::Use driver(context);
  context.check(driver->LaunchKernel(handle_, shape.blocks, 1, 1, shape.threads, 1, 1, 0,
                                     stream.put(), values.data(), nullptr),
                "cuLaunchKernel", [&] { return "launch " + name_; });
}

}  // namespace farandole::cuda
