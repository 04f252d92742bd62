// Memory of several devices at one address (NVLink SHARP): a load from there folds what all of them
// have, a store reaches all. The switch between the devices does it, for kernels' multimem
// instructions (kernels/multimem.h) and for nothing else.
#pragma once

#include <memory>
#include <optional>

#include "cuda/driver/virtual_memory.h"

namespace farandole::cuda {

/// One process's part in a multicast object. One process makes it, and the others open it by its
/// descriptor. Each adds its device; and when all have, each binds memory of its own.
class Multicast {
 public:
  /// The bytes that each of `devices` shall bind: `bytes`, rounded up to the driver's granularity.
  static size_t whole_bytes(const DeviceContext& context, int devices, size_t bytes);
  static std::unique_ptr<Multicast> make(const std::shared_ptr<const DeviceContext>& context,
                                         int devices, size_t bytes);
  static std::unique_ptr<Multicast> from(const std::shared_ptr<const DeviceContext>& context,
                                         const Fd& descriptor, int devices, size_t bytes);

  Multicast(std::shared_ptr<const DeviceContext> context, PhysicalMemory object, int devices,
            size_t bytes);
  /// No kernel of any device uses it any more.
  ~Multicast() = default;
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;

  /// A new one each time, for another process.
  Fd descriptor() const { return object_.descriptor(); }
  size_t bytes() const { return bytes_; }

  /// The context's. A device that was added stays.
  void add_device();
  /// Once all devices were added: before, the driver would wait for them.
  void bind();
  /// Then: this device's own memory, as any other.
  DevicePointer own() const { return own_->address(); }
  /// And that of all, for multimem instructions alone; until unmap().
  DevicePointer all() const { return all_->address(); }
  /// This process uses the others' memory no more. They may still use its own.
  void unmap() noexcept { all_.reset(); }

 private:
  /// That memory is bound.
  struct Binding {
    Binding(const DeviceContext& context, const PhysicalMemory& object,
            const PhysicalMemory& memory, size_t bytes);
    ~Binding();
    Binding(const Binding&) = delete;
    Binding& operator=(const Binding&) = delete;
    const DeviceContext& context;
    PhysicalHandle object;
    size_t bytes;
  };

  std::shared_ptr<const DeviceContext> context_;
  size_t bytes_, grain_;
  PhysicalMemory object_;
  std::optional<PhysicalMemory> memory_;
  std::optional<VirtualMapping> own_;
  std::optional<Binding> binding_;
  std::optional<VirtualMapping> all_;
};

}  // namespace farandole::cuda
