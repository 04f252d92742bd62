// The kernels of an exchange; and collectives by one kernel on each rank, which waits for the
// others': a one-shot of a small array, or a schedule.
#include <algorithm>
#include <array>
#include <string>

#include "cuda/exchange/exchange.h"

namespace farandole::cuda {

/// All that any operation may launch, before there is one: to load a kernel may wait for all that
/// runs, and what runs then may be a kernel that waits for the other ranks.
void Exchange::load_kernels() {
  for (const DTypeRow& d : kDTypes) {
    load(kernel_name("fold", d.dtype));
    if (mailbox_bytes_ > 0) load(kernel_name("one_shot", d.dtype));
    if (lane_flag_bytes_ > 0) load(kernel_name("lanes", d.dtype));
  }
  if (in_graphs_) return;  // their moves are copies, and they update nothing
  for (const DType dtype : {DType::float32, DType::float64}) {
    load(kernel_name("update", dtype));
    load(kernel_name("norms", dtype));
  }
  for (const DType width : kOfWidth) load(kernel_name("copy", width));
  for (const DType dtype : kScaled) load(kernel_name("copy", dtype));
}

void Exchange::load_scales(const void* image) {
  if (tables_) return;  // load_kernels() has all
  module_ = DeviceModule::load(context_, image);
  for (const DType dtype : kScaled) load(kernel_name("fold", dtype));
}

/// The same on all ranks: what the least of their devices has, and the most crowded of them.
Room Exchange::room() const {
  std::ptrdiff_t most = 1;
  for (const DeviceUuid& device : devices_)
    most = std::max(most, std::ranges::count(devices_, device));
  return {.processors = least_multiprocessors_, .ranks_on_device = static_cast<uint32_t>(most)};
}

/// Operations of an exchange come one after the other: all kernels that spin have the same flags.
Peers Exchange::spinning_peers() const {
  Peers all{.rank = rank_, .size = size_};
  all.abort = abort_word();
  for (uint32_t r = 0; r < size_; ++r) all.flags[r] = spin_flags_of(r);
  return all;
}

// ---- a one-shot ----

uint64_t Exchange::spin_bytes(bool granted) const {
  const Room shared = room();
  if (mailbox_bytes_ == 0 || (shared.ranks_on_device > 1 && !granted)) return 0;
  return uint64_t{blocks_for(Work::slots, ~uint32_t{0}, shared)} * kSlotBytes;
}

void Exchange::spin(const CudaPiece& piece, bool granted) {
  const DeviceContext::Use all_calls(*context_);
  const Folding& folding = piece.folding;
  const uint64_t bytes = piece.count * size_of(folding.dtype);
  if (bytes > spin_bytes(granted))
    throw Error(ErrorCode::internal, "more than kernels that run at once can take");
  std::array<void*, kMostRanks> mailboxes{};
  for (uint32_t r = 0; r < size_; ++r) mailboxes[r] = at_address(mailbox_of(r));
  // Arrays that lie apart are brought together first.
  const bool apart = !piece.in.empty();
  const DevicePointer input = apart ? bucket_of(rank_, piece.strand) : piece.input;
  const DevicePointer output = apart ? input : piece.output;
  move_in(piece);
  if (piece.count > 0) ++spun_;
  OneShot job = all_reduce_in_one(spinning_peers(), at_address(input), at_address(output),
                                  std::span(mailboxes).first(size_), piece.count, folding);
  if (!apart && !timed_) {  // nothing comes behind the kernel
    tells_itself_ = true;
    newest_ = job.number = completions_.number_for_kernel();
    job.done = static_cast<uint32_t*>(at_address(completions_.address()));
  }
  kernel(kernel_name("one_shot", folding.dtype))
      .launch(strands_[0].stream,
              {.blocks = blocks_for(Work::slots, bytes, room()), .threads = kThreads}, job);
  move_out(piece);
}

// ---- a schedule ----

/// Room in the parts of both strands: once the kernels meet, nobody uses the steps' data there.
LaneRoom Exchange::lane_room(bool granted) const {
  const Room shared = room();
  if (lane_flag_bytes_ == 0 || (shared.ranks_on_device > 1 && !granted)) return {};
  return cuda::lane_room(kCudaStrands * strand_bytes_, strand_bytes_, size_, shared);
}

void Exchange::run_lanes(const LanesAsked& asked, const CudaPiece& piece, bool granted) {
  const DeviceContext::Use all_calls(*context_);
  const LaneRoom room = lane_room(granted);
  const Folding& folding = piece.folding;
  const StreamRef& stream = strands_[0].stream;
  const LanesThere& plan = lane_tables_->get(stream, asked, completions_);
  if (plan.lanes > room.lanes || plan.scratch * size_of(folding.dtype) > room.scratch_bytes)
    throw Error(ErrorCode::internal, "a schedule that kernels which run at once cannot take");
  const DevicePointer here = bucket_of(rank_, 0);
  const bool apart = !piece.in.empty();
  move_in(piece);
  ++spun_;
  Lanes job{
      .peers = spinning_peers(),
      .formula = row(folding.op).formula,
      .slot_bytes = room.slot_bytes(plan.lanes, size_),
      .steps = plan.steps,
      .first = plan.first,
      .spaces = {at_address(apart ? here : piece.input), at_address(apart ? here : piece.output),
                 at_address(here + room.piece_bytes)},
      .leaf = scaling_of(folding.scales.leaf),
      .finish = scaling_of(folding.scales.finish)};
  for (uint32_t r = 0; r < size_; ++r) {
    job.flags[r] = lane_flags_of(r);
    job.mailboxes[r] =
        at_address(bucket_of(r, 0) + kCudaStrands * strand_bytes_ - room.mailbox_bytes);
  }
  kernel(kernel_name("lanes", folding.dtype))
      .launch(stream, {.blocks = plan.lanes, .threads = kThreads}, job);
  move_out(piece);
  note(0);
}

}  // namespace farandole::cuda
