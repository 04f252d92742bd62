// A path over shared memory: a way in which ranks that map each other's memory run a collective
// without messages. The table of paths: paths.h.
//
// All fold in canonical order. Designs and measurements: docs/benchmarks.md.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "schedule/routes.h"
#include "stream/backend.h"
#include "stream/stream_page.h"

namespace farandole {

class DirectPath {
 public:
  virtual ~DirectPath() = default;
  /// Called before the ranks have agreed: writes to this rank's page, and to slots lent to it.
  virtual void start(const Operation& operation) = 0;
  /// Called meanwhile: shows more of this rank's data; true if there was more.
  virtual bool show() { return false; }
  /// Called after the ranks have agreed.
  virtual Progress poll(TimePoint until) = 0;
  /// Backend::lacking, once the ranks have agreed.
  virtual std::vector<int> lacking() const = 0;
};

template <typename Path>
std::unique_ptr<DirectPath> make_path(const StreamMemory& memory) {
  return std::make_unique<Path>(memory);
}

/// From here on an output is evicted before any rank reads it, so its lines are not worth fetching.
/// Two ranks, a gather of 16 MiB in all: 1.14 ms, past the caches 0.88; of 4 MiB: no difference.
inline constexpr size_t kStreamedBytes = 8 << 20;

/// Tells the other ranks, with `posted`, where this rank's buffers lie.
void show_addresses(const Operation& operation, const StreamMemory& memory);

/// Facts that paths derive from the operation and the ranks' published addresses.
class DirectOperation {
 public:
  void start(const Operation& operation, const StreamMemory& memory);

  const Operation& operation() const { return *operation_; }
  const Shape& shape() const { return shape_; }
  Route route_to_me(int from) const { return route(operation_->kind, shape_, from, shape_.rank); }
  /// Bytes of rank r's input (output).
  size_t input_bytes(int r) const;
  size_t output_bytes(int r) const;
  /// Whether other ranks take anything of rank r's input.
  bool is_read(int r) const { return farandole::is_read(operation_->kind, shape_, r); }

  /// Where rank r's input (output) is mapped here; null when only its owner maps it.
  const std::byte* input_of(int r) const { return mapped(r, &Addresses::input, input_bytes(r)); }
  /// Where I can read rank r's input: my own always; null when only its owner maps it.
  const std::byte* readable_input_of(int r) const {
    return r == shape_.rank ? operation_->input.data : input_of(r);
  }
  std::byte* output_of(int r) const { return mapped(r, &Addresses::output, output_bytes(r)); }
  /// Every rank maps the outputs, and the inputs that it folds.
  bool all_is_mapped() const;
  bool mine_is_shared() const { return input_of(memory_->rank) != nullptr; }

  /// Where rank r's input (output) lies in that rank's own memory, for buffers not mapped here.
  uint64_t foreign_input_of(int r) const { return foreign(r, &Addresses::input); }
  uint64_t foreign_output_of(int r) const { return foreign(r, &Addresses::output); }
  /// Copies from (to) rank r's memory. False when that rank has ended or the group has failed: its
  /// verdict is on the way, and the operation goes no further. Throws Error naming the rank. To
  /// write, be on a Visit.
  bool read(int r, std::byte* to, uint64_t from, size_t bytes) const;
  bool write(int r, uint64_t to, const std::byte* from, size_t bytes) const;

  /// Works out this rank's output from all inputs, given where each can be read. If the operation
  /// folds, it advances `inputs` to this rank's part.
  void finish(std::span<const std::byte*> inputs, const struct Scales& scales,
              std::byte* output) const;

 private:
  uint64_t address(int r, std::atomic<uint64_t> Addresses::* which) const;
  std::byte* mapped(int r, std::atomic<uint64_t> Addresses::* which, size_t bytes) const;
  uint64_t foreign(int r, std::atomic<uint64_t> Addresses::* which) const;
  bool copied(int error, int r, std::string_view what) const;

  const Operation* operation_ = nullptr;
  const StreamMemory* memory_ = nullptr;
  Shape shape_;
};

}  // namespace farandole
