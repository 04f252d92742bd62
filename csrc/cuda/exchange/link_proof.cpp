#include "cuda/exchange/link_proof.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/hash.h"
#include "cuda/driver/device.h"
#include "cuda/plans.h"

namespace farandole::cuda {
namespace {

/// Longer than anything that a link gathers before it sends it on.
constexpr uint64_t kMostSlotBytes = 64 << 10;
constexpr auto kPatience = std::chrono::seconds(2);  // for what others have written
/// For copies of our own: streams that share a connection hold each other up (docs/cuda.md).
constexpr auto kStuck = std::chrono::seconds(60);
constexpr auto kBetweenLooks = std::chrono::microseconds(20);

}  // namespace

LinkProof::LinkProof(std::shared_ptr<const DeviceContext> context, uint32_t rank, uint32_t size,
                     uint64_t bytes)
    : context_(std::move(context)),
      rank_(rank),
      size_(size),
      slot_bytes_(std::min(kMostSlotBytes, bytes / size / 16 * 16)),
      buckets_(size),
      out_(context_, slot_bytes_),
      in_(context_, slot_bytes_) {}

void LinkProof::know(uint32_t rank, const AllocationId& id, const DeviceUuid& device,
                     DevicePointer at) {
  Hash hash;  // no earlier bucket in the same place has it
  hash.add(id.process);
  hash.add(id.number);
  buckets_.at(rank) = {static_cast<uint32_t>(hash.value()), device, at};
}

void LinkProof::show(const StreamRef& stream, const DeviceFunction& copy) {
  put(stream, copy, rank_, words());
}

void LinkProof::write(const StreamRef& stream, const DeviceFunction& copy, bool by_words) {
  for (uint32_t i = 1; i < size_; ++i) {
    const uint32_t r = (rank_ + i) % size_;
    const uint64_t last = words() - 1;
    put(stream, copy, r, by_words ? last : words());
    if (by_words) {
      WordBatch batch;
      batch.write(slot(r, rank_) + last * sizeof(uint32_t), word(r, rank_, last));
      stream.batch(std::move(batch));
    }
    fold(stream, copy, in_.address(), slot(r, r), words());
    finish(stream);
    if (!got(r, r, 0, words()))
      throw Error(ErrorCode::device,
                  label_of(rank_) + " does not read what is in the memory of " + label_of(r) +
                      ", though the driver says that it reaches it",
                  {}, "see docs/cuda.md about links between devices");
  }
}

bool LinkProof::has_come(const StreamRef& stream, bool& words_come) {
  if (until_ == TimePoint{}) until_ = now() + kPatience;
  const bool late = now() >= until_;
  words_come = true;
  for (uint32_t i = 1; i < size_; ++i) {
    const uint32_t r = (rank_ + i) % size_;
    stream.copy(in_.address(), slot(rank_, r), slot_bytes_);
    finish(stream);
    words_come &= got(rank_, r, words() - 1, 1);
    if (got(rank_, r, 0, words() - 1)) continue;
    if (!late) return false;
    throw Error(ErrorCode::device,
                label_of(rank_) + " gets nothing of what " + label_of(r) +
                    " writes there, though the driver says that it reaches it",
                {}, "see docs/cuda.md about links between devices");
  }
  return words_come || late;
}

DevicePointer LinkProof::slot(uint32_t owner, uint32_t writer) const {
  return buckets_[owner].at + writer * slot_bytes_;
}

uint32_t LinkProof::word(uint32_t owner, uint32_t writer, uint64_t index) const {
  Hash hash;
  hash.add(uint64_t{buckets_[owner].seed});
  hash.add(uint64_t{writer});
  return static_cast<uint32_t>(hash.value() + index * 0x9e3779b9);
}

/// Copies the first `words` of this rank's pattern for a bucket there.
void LinkProof::put(const StreamRef& stream, const DeviceFunction& copy, uint32_t owner,
                    uint64_t words) {
  auto* const to = reinterpret_cast<uint32_t*>(out_.host());
  for (uint64_t i = 0; i < words; ++i) to[i] = word(owner, rank_, i);
  fold(stream, copy, slot(owner, rank_), out_.address(), words);
  finish(stream);
}

/// Whether these words of what was copied here are those of a writer for a bucket.
bool LinkProof::got(uint32_t owner, uint32_t writer, uint64_t first, uint64_t words) const {
  const auto* const found = reinterpret_cast<const uint32_t*>(in_.host());
  for (uint64_t i = first; i < first + words; ++i)
    if (found[i] != word(owner, writer, i)) return false;
  return true;
}

void LinkProof::fold(const StreamRef& stream, const DeviceFunction& copy, DevicePointer to,
                     DevicePointer from, uint64_t words) const {
  const void* const source = at_address(from);
  void* const destination = at_address(to);
  const Fold job = fold_of({&source, 1}, {&destination, 1}, 0, words, {.dtype = DType::uint32});
  copy.launch(stream, {.blocks = 1, .threads = kThreads}, job);
}

void LinkProof::finish(const StreamRef& stream) const {
  const Deadline patience = Deadline::after(kStuck);
  while (!stream.idle()) {
    if (patience.passed(now()))
      throw Error(ErrorCode::device,
                  label_of(rank_) +
                      " has not copied 64 KiB within a minute: something before them "
                      "holds its streams up");
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

std::string LinkProof::label_of(uint32_t rank) const {
  const DeviceUuid& uuid = buckets_[rank].device;
  for (const DeviceProperties& device : all_devices(context_->driver()))
    if (device.uuid == uuid) return device.label();
  DeviceProperties hidden;
  hidden.uuid = uuid;
  return hidden.uuid_text();
}

}  // namespace farandole::cuda
