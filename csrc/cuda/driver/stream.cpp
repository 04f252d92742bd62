#include "cuda/driver/stream.h"

#include <bit>

#include "base/fd.h"
#include "cuda/driver/event.h"

namespace farandole::cuda {

void WordBatch::write(DevicePointer word, uint32_t value) {
  operations_.push_back({kWriteWord, word, value, 0, {}});
}

void WordBatch::wait(DevicePointer word, uint32_t value) {
  operations_.push_back({kWaitForWord, word, value, kWaitUntilReached, {}});
}

void StreamRef::copy(DevicePointer to, DevicePointer from, size_t bytes) const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->MemcpyAsync(to, from, bytes, put()), "cuMemcpyAsync",
                  [&] { return "copy " + std::to_string(bytes) + " bytes"; });
}

void StreamRef::fill(DevicePointer to, uint8_t value, size_t bytes) const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->MemsetD8Async(to, value, bytes, put()), "cuMemsetD8Async",
                  [&] { return "fill " + std::to_string(bytes) + " bytes"; });
}

void StreamRef::fill_words(DevicePointer to, uint32_t value, size_t words) const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->MemsetD32Async(to, value, words, put()), "cuMemsetD32Async",
                  [&] { return "fill " + std::to_string(words) + " words"; });
}

void StreamRef::wait(const DeviceEvent& event) const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->StreamWaitEvent(put(), event.handle(), 0), "cuStreamWaitEvent",
                  "let a stream wait for an event");
}

void StreamRef::wait(DevicePointer word, uint32_t value) const {
  if (!try_wait(word, value))
    context_->check(kNotSupported, "cuStreamWaitValue32", "let a stream wait for a word");
}

bool StreamRef::try_wait(DevicePointer word, uint32_t value) const {
  const DeviceContext::Use driver(*context_);
  const DriverCode code = driver->StreamWaitValue32(put(), word, value, kWaitUntilReached);
  if (code == kNotSupported) return false;
  context_->check(code, "cuStreamWaitValue32", "let a stream wait for a word");
  return true;
}

void StreamRef::batch(WordBatch batch) const {
  const DeviceContext::Use driver(*context_);
  std::vector<MemoryOperation>& all = batch.operations_;  // to which the driver may write
  const DriverCode code =
      driver->StreamBatchMemOp == nullptr
          ? kNotSupported
          : driver->StreamBatchMemOp(put(), static_cast<unsigned>(all.size()), all.data(), 0);
  context_->check(code, "cuStreamBatchMemOp", "let a stream write words and wait for others");
}

void StreamRef::wait_for_bits(DevicePointer word, uint32_t bits) const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->StreamWaitValue32(put(), word, bits, kWaitUntilAnyBit),
                  "cuStreamWaitValue32", "let a stream wait for a word");
}

void StreamRef::write(DevicePointer word, uint32_t value) const {
  const DeviceContext::Use driver(*context_);
  DriverCode code = driver->StreamWriteValue32(put(), word, value, 0);
  // Virtual GPUs may lack it; a fill of one element is slower and does the same.
  if (code == kNotSupported) code = driver->MemsetD32Async(word, value, 1, put());
  context_->check(code, "cuStreamWriteValue32", "let a stream write a word");
}

void StreamRef::call(HostFunction act, void* user) const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->LaunchHostFunc(put(), act, user), "cuLaunchHostFunc",
                  "let a stream call a function");
}

void StreamRef::ring(int event_fd) const {
  // The number itself travels in the pointer: there is nothing that could be freed too early.
  call([](void* number) { farandole::ring(static_cast<int>(reinterpret_cast<intptr_t>(number))); },
       std::bit_cast<void*>(static_cast<intptr_t>(event_fd)));
}

bool StreamRef::is_captured() const {
  const DeviceContext::Use driver(*context_);
  int status = kNotCaptured;
  context_->check(driver->StreamIsCapturing(handle_, &status), "cuStreamIsCapturing",
                  "ask whether a stream is being captured");
  if (status == kSpoiltCapture)
    throw Error(ErrorCode::invalid_argument,
                "the capture of a stream into a CUDA graph was ended by an error before", {},
                "look at the error before this one");
  return status != kNotCaptured;
}

bool StreamRef::when_graph_is_gone(HostFunction act, void* user) const {
  const DeviceContext::Use driver(*context_);
  if (driver->StreamGetCaptureInfo == nullptr || driver->UserObjectCreate == nullptr ||
      driver->GraphRetainUserObject == nullptr)
    return false;
  int status = kNotCaptured;
  unsigned long long id = 0;
  GraphHandle graph = nullptr;
  context_->check(driver->StreamGetCaptureInfo(handle_, &status, &id, &graph, nullptr, nullptr),
                  "cuStreamGetCaptureInfo",
                  "ask for the graph that a stream is being captured into");
  UserObjectHandle object = nullptr;
  context_->check(driver->UserObjectCreate(&object, user, act, 1, kNoDestructorSync),
                  "cuUserObjectCreate", "make an object that a graph keeps");
  context_->check(driver->GraphRetainUserObject(graph, object, 1, kMoveUserObject),
                  "cuGraphRetainUserObject", "let a graph keep an object");
  return true;
}

void StreamRef::refuse_capture() const {
  if (is_captured())
    throw Error(ErrorCode::invalid_argument,
                "the stream of an array is being captured into a CUDA graph, and this operation "
                "cannot be part of one",
                {},
                "wait for operations before the capture begins; collectives that begin within "
                "it become part of it");
}

bool StreamRef::idle() const {
  const DeviceContext::Use driver(*context_);
  const DriverCode code = driver->StreamQuery(handle_);
  if (code == kNotReady) return false;
  context_->check(code, "cuStreamQuery", "ask a stream whether it is done");
  return true;
}

void StreamRef::synchronize() const {
  const DeviceContext::Use driver(*context_);
  context_->check(driver->StreamSynchronize(handle_), "cuStreamSynchronize", "wait for a stream");
}

DeviceStream::DeviceStream(std::shared_ptr<const DeviceContext> context)
    : StreamRef(std::move(context), nullptr) {
  const DeviceContext::Use driver(*context_);
  int least = 0, greatest = 0;
  context_->check(driver->CtxGetStreamPriorityRange(&least, &greatest),
                  "cuCtxGetStreamPriorityRange", "ask for the priorities of streams");
  context_->check(driver->StreamCreateWithPriority(&handle_, kStreamNonBlocking, greatest),
                  "cuStreamCreateWithPriority", "make a stream");
}

DeviceStream::~DeviceStream() {
  // Unwinding frees memory next that the stream may still use.
  context_->at_end("cuStreamSynchronize",
                   [&](const auto& driver) { return driver.StreamSynchronize(handle_); });
  context_->at_end("cuStreamDestroy",
                   [&](const auto& driver) { return driver.StreamDestroy(handle_); });
}

}  // namespace farandole::cuda
