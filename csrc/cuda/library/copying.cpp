#include "cuda/library/copying.h"

#include <bit>
#include <memory>
#include <utility>

#include "cuda/driver/copy_streams.h"
#include "cuda/library/guarded.h"

/// Opaque outside.
struct farandole::CudaQueue {
  cuda::CopyStreams streams;
};
struct farandole::CudaPages {
  cuda::RegisteredPages pages;
};
struct farandole::CudaMemory {
  std::unique_ptr<cuda::DeviceMemory> memory;
};

namespace farandole::cuda {
namespace {

StreamHandle stream_from(uint64_t handle) { return std::bit_cast<StreamHandle>(handle); }

int32_t find_device(uint64_t address, int32_t* ordinal, CudaFailure* failure) {
  return guarded(failure, [&] {
    *ordinal = device_of(*Driver::of_process(), address);
    return 1;
  });
}

CudaQueue* open_queue(int32_t ordinal, int32_t doorbell, CudaFailure* failure) {
  return guarded(failure, [&] {
    const auto context = DeviceContext::retain(Driver::of_process(), ordinal);
    return new CudaQueue{{context, doorbell}};
  });
}

void close_queue(CudaQueue* queue) { delete queue; }

uint64_t stream_to_host(const CudaQueue* queue) {
  return reinterpret_cast<uint64_t>(queue->streams.stream(kToHost).handle());
}

CudaPages* register_pages(CudaQueue* queue, void* pages, uint64_t bytes, CudaFailure* failure) {
  return guarded(failure, [&] {
    return new CudaPages{{queue->streams.context(), {static_cast<std::byte*>(pages), bytes}}};
  });
}

void release_pages(CudaPages* pages) { delete pages; }

CudaMemory* allocate(CudaQueue* queue, uint64_t bytes, uint64_t* address, CudaFailure* failure) {
  return guarded(failure, [&] {
    auto memory = allocate_device(queue->streams.context(), bytes, Sharing::none);
    const StreamRef& stream = queue->streams.stream(kToDevice);
    stream.fill(memory->address(), 0, bytes);
    stream.synchronize();
    *address = memory->address();
    return new CudaMemory{std::move(memory)};
  });
}

void release(CudaMemory* memory) { delete memory; }

int32_t copy_to_host(CudaQueue* queue, CudaPages* to, uint64_t offset, uint64_t from,
                     uint64_t bytes, CudaFailure* failure) {
  return guarded(failure, [&] {
    queue->streams.stream(kToHost).copy(to->pages.address() + offset, from, bytes);
    return 1;
  });
}

int32_t copy_to_device(CudaQueue* queue, uint64_t to, CudaPages* from, uint64_t offset,
                       uint64_t bytes, CudaFailure* failure) {
  return guarded(failure, [&] {
    queue->streams.stream(kToDevice).copy(to, from->pages.address() + offset, bytes);
    return 1;
  });
}

int32_t mark(CudaQueue* queue, CudaWay way, uint32_t* number, CudaFailure* failure) {
  return guarded(failure, [&] {
    *number = queue->streams.mark(way);
    return 1;
  });
}

int32_t reached(const CudaQueue* queue, CudaWay way, uint32_t number) {
  return queue->streams.reached(way, number);
}

int32_t look_for_loss(CudaQueue* queue, CudaFailure* failure) {
  return guarded(failure, [&] {
    queue->streams.look_for_loss();
    return 1;
  });
}

int32_t follow(CudaQueue* queue, uint64_t stream, CudaFailure* failure) {
  return guarded(failure, [&] {
    queue->streams.follow(stream_from(stream));
    return 1;
  });
}

int32_t precede(CudaQueue* queue, uint64_t stream, CudaFailure* failure) {
  return guarded(failure, [&] {
    queue->streams.precede(stream_from(stream));
    return 1;
  });
}

int32_t synchronize(CudaQueue* queue, CudaWay way, CudaFailure* failure) {
  return guarded(failure, [&] {
    queue->streams.stream(way).synchronize();
    return 1;
  });
}

int32_t is_captured(const CudaQueue* queue, uint64_t stream, int32_t* captured,
                    CudaFailure* failure) {
  return guarded(failure, [&] {
    const StreamRef asked(queue->streams.context(), stream_from(stream));
    *captured = asked.is_captured() ? 1 : 0;
    return 1;
  });
}

}  // namespace

void add_copying(CudaTable& table) {
  table.device_of = find_device;
  table.open_queue = open_queue;
  table.close_queue = close_queue;
  table.stream_to_host = stream_to_host;
  table.register_pages = register_pages;
  table.release_pages = release_pages;
  table.allocate = allocate;
  table.release = release;
  table.copy_to_host = copy_to_host;
  table.copy_to_device = copy_to_device;
  table.mark = mark;
  table.reached = reached;
  table.look_for_loss = look_for_loss;
  table.follow = follow;
  table.precede = precede;
  table.is_captured = is_captured;
  table.synchronize = synchronize;
}

}  // namespace farandole::cuda
