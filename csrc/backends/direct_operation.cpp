#include <cerrno>
#include <cstring>
#include <string>

#include "backends/direct_path.h"
#include "base/copy.h"
#include "base/wire.h"
#include "fold/fold.h"
#include "schedule/slicing.h"
#include "transport/foreign_memory.h"

namespace farandole {
namespace {

/// In place, a rank's own share stands where it belongs; peers may be reading it.
void move(std::byte* to, const std::byte* from, size_t bytes) {
  if (to != from) copy_bytes(to, from, bytes);
}

}  // namespace

void show_addresses(const Operation& operation, const StreamMemory& memory) {
  const auto address = [&](const Buffer& b) {
    if (b.count == 0) return uint64_t{0};
    const auto offset = memory.segment->offset_of(b.data, b.bytes());
    return offset ? *offset + 1 : reinterpret_cast<uint64_t>(b.data) | kForeign;
  };
  Addresses& mine = memory.mine().entry.addresses[memory.sequence() % 2];
  // Relaxed: released with `posted`.
  mine.input.store(address(operation.input), std::memory_order_relaxed);
  mine.output.store(address(operation.output), std::memory_order_relaxed);
}

void DirectOperation::start(const Operation& operation, const StreamMemory& memory) {
  operation_ = &operation;
  memory_ = &memory;
  shape_ = shape_of(operation, memory.rank, memory.size());
}

uint64_t DirectOperation::address(int r, std::atomic<uint64_t> Addresses::* which) const {
  const Addresses& addresses = memory_->page(r).entry.addresses[memory_->sequence() % 2];
  return (addresses.*which).load(std::memory_order_relaxed);
}

std::byte* DirectOperation::mapped(int r, std::atomic<uint64_t> Addresses::* which,
                                   size_t bytes) const {
  const uint64_t at = address(r, which);
  if (at == 0 || (at & kForeign) != 0) return nullptr;
  return taken("the address of a buffer", memory_->members[static_cast<size_t>(r)],
               memory_->members[static_cast<size_t>(memory_->rank)],
               [&] { return memory_->segment->at(at - 1, bytes); });
}

uint64_t DirectOperation::foreign(int r, std::atomic<uint64_t> Addresses::* which) const {
  return address(r, which) & ~kForeign;
}

bool DirectOperation::read(int r, std::byte* to, uint64_t from, size_t bytes) const {
  const pid_t process = memory_->processes[static_cast<size_t>(r)];
  return copied(read_foreign(process, to, from, bytes), r, "read");
}

bool DirectOperation::write(int r, uint64_t to, const std::byte* from, size_t bytes) const {
  const pid_t process = memory_->processes[static_cast<size_t>(r)];
  return copied(write_foreign(process, to, from, bytes), r, "written");
}

bool DirectOperation::copied(int error, int r, std::string_view what) const {
  if (error == 0) return true;
  // A rank whose group failed has its memory back, and may have freed it.
  if (error == ESRCH || memory_->failed()) return false;
  Context where;
  where.rank = memory_->members[static_cast<size_t>(r)];
  where.pid = memory_->processes[static_cast<size_t>(r)];
  where.evidence = std::string("the kernel says: ") + std::strerror(error) + "; seen by rank " +
                   std::to_string(memory_->members[static_cast<size_t>(memory_->rank)]);
  std::string verdict =
      "the buffer of rank " + std::to_string(where.rank) + " could not be " + std::string(what);
  throw Error(ErrorCode::resource, verdict, std::move(where),
              error == EFAULT
                  ? "do not free, unmap or protect memory that an operation in flight uses"
                  : "set FARANDOLE_CMA=0 to copy through shared memory");
}

bool DirectOperation::all_is_mapped() const {
  for (int r = 0; r < memory_->size(); ++r)
    if ((folds(operation_->kind) && input_bytes(r) > 0 && input_of(r) == nullptr) ||
        (output_bytes(r) > 0 && output_of(r) == nullptr))
      return false;
  return true;
}

size_t DirectOperation::input_bytes(int r) const {
  if (r == shape_.rank) return operation_->input.bytes();
  return input_count(operation_->kind, shape_, r) * size_of(operation_->input.dtype);
}

size_t DirectOperation::output_bytes(int r) const {
  Shape theirs = shape_;
  theirs.rank = r;
  return sizes_of(operation_->kind, theirs).output * size_of(operation_->input.dtype);
}

void DirectOperation::finish(std::span<const std::byte*> inputs, const Scales& scales,
                             std::byte* output) const {
  const Operation& o = *operation_;
  const size_t element = size_of(o.input.dtype);
  if (folds(o.kind)) {
    const Slice take = route_to_me(0).take;  // the same of every rank
    for (const std::byte*& input : inputs) input += take.offset * element;
    if (take.count > 0) fold_canonical(output, inputs, take.count, o.input.dtype, o.op, scales);
    return;
  }
  for (size_t r = 0; r < inputs.size(); ++r) {
    const Route from = route_to_me(static_cast<int>(r));
    move(output + from.put.offset * element, inputs[r] + from.take.offset * element,
         from.take.count * element);
  }
}

}  // namespace farandole
