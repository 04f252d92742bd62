#include "cuda/driver/multicast.h"

#include <algorithm>
#include <string>

namespace farandole::cuda {
namespace {

MulticastProperties properties_of(int devices, size_t bytes) {
  MulticastProperties properties{};
  properties.devices = static_cast<unsigned>(devices);
  properties.bytes = bytes;
  properties.handle_types = kByDescriptor;
  return properties;
}

/// The unit of sizes and addresses, also of the memory that is bound.
size_t grain_of(const DeviceContext& context, int devices, size_t bytes) {
  const MulticastProperties properties = properties_of(devices, bytes);
  size_t grain = 0;
  const DeviceContext::Use driver(context);
  context.check(driver->MulticastGetGranularity(&grain, &properties, kMinimumGranularity),
                "cuMulticastGetGranularity", "ask for the size of pages that devices share");
  return std::max(grain, granularity_of(context));  // both are powers of two
}

}  // namespace

size_t Multicast::whole_bytes(const DeviceContext& context, int devices, size_t bytes) {
  const size_t grain = grain_of(context, devices, bytes);
  return (bytes + grain - 1) / grain * grain;
}

Multicast::Multicast(std::shared_ptr<const DeviceContext> context, PhysicalMemory object,
                     int devices, size_t bytes)
    : context_(std::move(context)),
      bytes_(bytes),
      grain_(grain_of(*context_, devices, bytes)),
      object_(std::move(object)) {}

std::unique_ptr<Multicast> Multicast::make(const std::shared_ptr<const DeviceContext>& context,
                                           int devices, size_t bytes) {
  const MulticastProperties properties = properties_of(devices, bytes);
  PhysicalHandle handle = 0;
  const DeviceContext::Use driver(*context);
  const auto tried = [&] { return "join memory of " + std::to_string(devices) + " devices"; };
  context->check(driver->MulticastCreate(&handle, &properties), "cuMulticastCreate", tried);
  return std::make_unique<Multicast>(context, PhysicalMemory(context, handle), devices, bytes);
}

std::unique_ptr<Multicast> Multicast::from(const std::shared_ptr<const DeviceContext>& context,
                                           const Fd& descriptor, int devices, size_t bytes) {
  return std::make_unique<Multicast>(context, PhysicalMemory::from(context, descriptor), devices,
                                     bytes);
}

void Multicast::add_device() {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->MulticastAddDevice(object_.handle(), context_->device().handle),
                  "cuMulticastAddDevice", "let the device take part in a multicast object");
}

Multicast::Binding::Binding(const DeviceContext& of, const PhysicalMemory& to,
                            const PhysicalMemory& memory, size_t size)
    : context(of), object(to.handle()), bytes(size) {
  constexpr char kCall[] = "cuMulticastBindMem", kTried[] = "bind memory to a multicast object";
  const DeviceContext::Use driver(context);
  const DriverCode code = driver->MulticastBindMem(object, 0, memory.handle(), 0, bytes, 0);
  // The switch's service does not run. All else works: this context is not lost.
  if (code == kSystemNotReady)
    throw status_error(context.driver().functions(), code, kCall,
                       std::string(kTried) + " on " + context.device().label());
  context.check(code, kCall, kTried);
}

Multicast::Binding::~Binding() {
  context.at_end("cuMulticastUnbind", [&](const auto& driver) {
    return driver.MulticastUnbind(object, context.device().handle, 0, bytes);
  });
}

void Multicast::bind() {
  memory_.emplace(PhysicalMemory::make(context_, bytes_));
  own_.emplace(context_, *memory_, bytes_);
  binding_.emplace(*context_, object_, *memory_, bytes_);
  all_.emplace(context_, object_, bytes_, grain_);
}

}  // namespace farandole::cuda
