// Streams of a device: what is put into one runs in order, and nothing here waits for it except
// synchronize().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/driver/context.h"

namespace farandole::cuda {

class DeviceEvent;

/// Words that a stream writes and waits for, in this order, by one call of the driver.
class WordBatch {
 public:
  /// All before it is done then, and can be seen.
  void write(DevicePointer word, uint32_t value);
  /// Until it is reached, as StreamRef::wait() has it.
  void wait(DevicePointer word, uint32_t value);

 private:
  friend class StreamRef;
  std::vector<MemoryOperation> operations_;
};

/// A stream of anyone's: ours, or a framework's current one. All calls throw Error.
class StreamRef {
 public:
  StreamRef(std::shared_ptr<const DeviceContext> context, StreamHandle handle)
      : context_(std::move(context)), handle_(handle) {}

  const DeviceContext& context() const { return *context_; }
  StreamHandle handle() const { return handle_; }
  /// The same, for one more call that puts something into it.
  StreamHandle put() const {
    std::atomic_ref(calls_).fetch_add(1, std::memory_order_relaxed);
    return handle_;
  }
  /// How many calls did so, modulo 2^32.
  uint32_t calls() const { return std::atomic_ref(calls_).load(std::memory_order_relaxed); }

  /// Between memory of devices and pinned memory of the host, in any direction.
  void copy(DevicePointer to, DevicePointer from, size_t bytes) const;
  void fill(DevicePointer to, uint8_t value, size_t bytes) const;
  /// `words` of four bytes, each of which its readers see whole.
  void fill_words(DevicePointer to, uint32_t value, size_t words) const;
  /// Later work waits for the work before the last record of the event.
  void wait(const DeviceEvent& event) const;
  /// Later work waits until another rank or the host has written the word, which only grows (modulo
  /// 2^32).
  void wait(DevicePointer word, uint32_t value) const;
  /// The same; false, and nothing waits, where the driver cannot let streams wait for words.
  bool try_wait(DevicePointer word, uint32_t value) const;
  /// At most 255 words.
  void batch(WordBatch batch) const;
  /// Later work waits until the word has one of these bits.
  void wait_for_bits(DevicePointer word, uint32_t bits) const;
  /// Writes a word once all before it is done, and its results can be seen. Readers of the word
  /// need no call of the driver.
  void write(DevicePointer word, uint32_t value) const;
  /// Then `act(user)` runs, in a thread of the driver's. It must not call the driver, nor wait. It
  /// does not run at all if the context is lost before.
  void call(HostFunction act, void* user) const;
  /// Then the descriptor is rung (base/fd.h), which is open for as long as that may happen.
  void ring(int event_fd) const;

  /// Whether work put into it becomes part of a graph instead.
  bool is_captured() const;
  /// Throws Error(invalid_argument) where that is so.
  void refuse_capture() const;
  /// While it is captured: `act(user)` runs, in a thread of the driver's, once the graph and all
  /// that was made of it are gone, and have run. It must not call the driver. False, and never,
  /// with drivers before 11.3.
  bool when_graph_is_gone(HostFunction act, void* user) const;
  /// Whether all is done. Throws the lasting error of a kernel that failed.
  bool idle() const;
  /// Blocks the host until all is done.
  void synchronize() const;

 protected:
  std::shared_ptr<const DeviceContext> context_;
  StreamHandle handle_;
  mutable uint32_t calls_ = 0;  // threads may record in one stream
};

/// A stream of our own, before all others of the device, which waits for no default stream.
class DeviceStream : public StreamRef {
 public:
  explicit DeviceStream(std::shared_ptr<const DeviceContext> context);
  /// Waits until all is done, so that memory made before the stream is free afterwards. To give up
  /// a kernel that spins, set its abort word first.
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
};

}  // namespace farandole::cuda
