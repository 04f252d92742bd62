#include "cuda/plans.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "fold/kernels.h"
#include "schedule/planners.h"

namespace farandole::cuda {
namespace {

constexpr uint64_t kAccessBytes = 16;
/// Accesses of a thread before another block is worth its start.
constexpr uint64_t kAccessesOfThread = 4;
/// 2048 threads is what a multiprocessor holds: fewer would leave requests to memory unmade.
constexpr uint64_t kLastingBlocks = 2048 / kThreads;
/// Several times as many: a multiprocessor that has done with one takes the next, and none has long
/// to do when the others are done. Beyond that their starts would cost more.
constexpr uint64_t kBlocksAlone = 4 * kLastingBlocks;
/// Blocks that keep a link busy. One that moves B bytes a second after a latency of L has B * L
/// bytes on their way; a block has 8 loads of 16 bytes for each thread. Half as many again make up
/// for blocks that are between two rounds. More would take the device's multiprocessors from
/// backward, and move nothing faster. B: NVLink 4, one way; L: an estimate.
constexpr double kLinkBandwidth = 4.5e11, kLinkLatency = 2e-6, kBytesOfBlock = 8 * 16 * kThreads;
constexpr auto kLinkBlocks =
    static_cast<uint64_t>(1.5 * kLinkBandwidth * kLinkLatency / kBytesOfBlock);
/// Lanes beyond these would move no more, and leave less of the device to what runs beside them.
/// Smaller slots are handed over more often than they are worth, larger ones later than they could.
constexpr uint64_t kLeastSlotBytes = 256, kMostSlotBytes = 16384;
/// Scratch of any planner, in arrays of the piece's length; and packs that each lane may have
/// besides, and one for each rank, where shares of a piece do not divide.
constexpr uint64_t kScratchOfPiece = 2, kScratchOfLane = 16;
/// Elements of every dtype that fill whole packs.
constexpr uint64_t kWholePacks = 128;

const void* at(const void* array, size_t element, size_t size) {
  return static_cast<const std::byte*>(array) + element * size;
}
void* at(void* array, size_t element, size_t size) {
  return static_cast<std::byte*>(array) + element * size;
}

}  // namespace

Scaling scaling_of(const Scale& scale) {
  const Factor factor = factor_of(scale.factor);
  return {.float64 = factor.float64,
          .float32 = factor.float32,
          .applies = scale.is_identity() ? 0U : 1U,
          .divide = scale.divide};
}

Fold fold_of(Inputs sources, Outputs destinations, size_t first, size_t count,
             const Folding& folding) {
  const size_t element = size_of(folding.dtype);
  Fold job{.count = count,
           .source_count = static_cast<uint32_t>(sources.size()),
           .destination_count = static_cast<uint32_t>(destinations.size()),
           .formula = row(folding.op).formula,
           .leaf = scaling_of(folding.scales.leaf),
           .finish = scaling_of(folding.scales.finish)};
  for (size_t i = 0; i < sources.size(); ++i) job.sources[i] = at(sources[i], first, element);
  for (size_t i = 0; i < destinations.size(); ++i)
    job.destinations[i] = at(destinations[i], first, element);
  return job;
}

OneShot all_reduce_in_one(const Peers& peers, const void* input, void* output, Outputs mailboxes,
                          size_t count, const Folding& folding) {
  OneShot job{.peers = peers,
              .count = count,
              .formula = row(folding.op).formula,
              .leaf = scaling_of(folding.scales.leaf),
              .finish = scaling_of(folding.scales.finish),
              .input = input,
              .output = output};
  std::ranges::copy(mailboxes, job.mailboxes);
  return job;
}

std::string kernel_name(std::string_view what, DType dtype) {
  return "farandole_" + std::string(what) + "_" + std::string(name_of(dtype));
}

namespace {

/// Fills first_chunk of each piece; how many chunks they have together.
template <typename AnyPiece>
uint64_t number_chunks(std::span<AnyPiece> pieces) {
  uint64_t chunks = 0;
  for (AnyPiece& piece : pieces) {
    piece.first_chunk = chunks;
    chunks += chunks_of(piece.count);
  }
  return chunks;
}

}  // namespace

Pieces pieces_of(std::span<Piece> pieces, const Piece* table, const Scale& scale) {
  return {.pieces = table,
          .piece_count = static_cast<uint32_t>(pieces.size()),
          .chunks = number_chunks(pieces),
          .scaling = scaling_of(scale)};
}

Updates updates_of(std::span<const UpdatePiece> pieces) {
  Updates all;
  all.piece_count = pieces.size();
  std::ranges::copy(pieces, all.pieces);
  all.chunks = number_chunks(std::span(all.pieces).first(pieces.size()));
  return all;
}

Norms norms_of(std::span<const NormPiece> pieces, uint64_t tile, bool largest, double* made,
               double* scratch) {
  Norms all;
  all.piece_count = pieces.size();
  all.tile = tile;
  all.largest = largest ? 1 : 0;
  all.made = made;
  all.scratch = scratch;
  std::ranges::copy(pieces, all.pieces);
  for (NormPiece& piece : std::span(all.pieces).first(pieces.size())) {
    piece.first_chunk = all.terms;
    all.terms += tiles_of(piece.begin, piece.count, tile);
  }
  return all;
}

LaneTable lanes_of(const Schedule& schedule, int lanes) {
  const auto code = [](auto word) { return static_cast<uint8_t>(word); };
  LaneTable table{.steps = {}, .first = {0}, .scratch = schedule.scratch};
  for (const Lane& lane : schedule.lanes) {
    for (const Step& s : lane) {
      const Slice& held = s.held.count > 0 ? s.held : s.recv;
      table.steps.push_back({.to = s.to,
                             .from = s.from,
                             .send_space = code(s.send.space),
                             .recv_space = code(s.recv.space),
                             .held_space = code(held.space),
                             .action = code(s.action),
                             .leaf_arrived = code(s.leaf_arrived),
                             .leaf_held = code(s.leaf_held),
                             .finish = code(s.finish),
                             .send_offset = s.send.offset,
                             .send_count = s.to == kNobody ? 0 : s.send.count,
                             .recv_offset = s.recv.offset,
                             .recv_count = s.from == kNobody ? 0 : s.recv.count,
                             .held_offset = held.offset});
    }
    table.first.push_back(static_cast<uint32_t>(table.steps.size()));
  }
  table.first.resize(static_cast<size_t>(lanes) + 1, static_cast<uint32_t>(table.steps.size()));
  return table;
}

namespace {

template <typename Change>
void change_slices(Schedule& schedule, Change change) {
  for (Lane& lane : schedule.lanes)
    for (Step& step : lane)
      for (Slice* slice : {&step.send, &step.recv, &step.held}) change(*slice);
}

}  // namespace

LaneTable lanes_of(const LanesAsked& asked, uint32_t rank, uint32_t size) {
  const Planner* const planner = find_planner(asked.kind, asked.planner);
  if (planner == nullptr)
    throw Error(ErrorCode::internal, "there is no planner '" + asked.planner + "' for " +
                                         std::string(name_of(asked.kind)));
  const auto plan = [&](size_t count, int lanes) {
    return planner->plan({.rank = static_cast<int>(rank),
                          .size = static_cast<int>(size),
                          .count = count,
                          .counts = asked.counts,
                          .lanes = lanes,
                          .segments = asked.segments,
                          .root = asked.root});
  };
  const size_t grain = asked.grain, whole = asked.count / grain * grain;
  Schedule schedule = plan(asked.count / grain, asked.lanes);
  change_slices(schedule, [&](Slice& s) { s = {s.space, s.offset * grain, s.count * grain}; });
  schedule.scratch *= grain;
  if (whole < asked.count) {
    Schedule rest = plan(asked.count - whole, 1);
    change_slices(
        rest, [&](Slice& s) { s.offset += s.space == Space::scratch ? schedule.scratch : whole; });
    schedule.scratch += rest.scratch;
    schedule.lanes.resize(static_cast<size_t>(asked.lanes));
    Lane& last = schedule.lanes.back();
    for (const Lane& lane : rest.lanes) last.insert(last.end(), lane.begin(), lane.end());
  }
  return lanes_of(schedule, asked.lanes);
}

/// In every lane a rank exchanges each segment at most twice with each other one.
size_t longest_lane_table(uint32_t size) {
  const size_t steps = size_t{kMostSegments} * (2 * size + 2);
  return std::bit_ceil(kMostLanes * (steps * sizeof(LaneStep) + 2 * sizeof(uint32_t)));
}

uint32_t most_lasting_blocks(uint32_t processors) {
  return static_cast<uint32_t>(processors * kLastingBlocks);
}

uint32_t blocks_for_chunks(uint64_t chunks, uint32_t processors) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(chunks, 1, processors * kBlocksAlone));
}

uint32_t blocks_for(Work work, uint64_t bytes, const Room& room) {
  const uint64_t of_block =
      work == Work::slots ? kSlotBytes : kAccessBytes * kAccessesOfThread * kThreads;
  const uint64_t wanted = std::max<uint64_t>(1, (bytes + of_block - 1) / of_block);
  if (work == Work::alone) return blocks_for_chunks(wanted, room.processors);
  if (work == Work::links)
    return static_cast<uint32_t>(
        std::min(wanted, room.link_blocks > 0 ? room.link_blocks : kLinkBlocks));
  if (work == Work::lasting)
    return static_cast<uint32_t>(std::min<uint64_t>(wanted, most_lasting_blocks(room.processors)));
  // Blocks that wait must all run at once, those of other ranks on this device, too. They leave
  // room for the step that they run beside.
  const uint64_t resident =
      std::max<uint64_t>(1, room.processors * kResidentBlocks / room.ranks_on_device);
  return static_cast<uint32_t>(std::min({wanted, resident, uint64_t{kMostChannels}}));
}

uint32_t LaneRoom::slot_bytes(uint32_t of_lanes, uint32_t size) const {
  const uint64_t each = mailbox_bytes / lane_mailbox_bytes(of_lanes, size, 1);
  return static_cast<uint32_t>(std::min(kMostSlotBytes, each / 16 * 16));
}

/// Half of what may be resident: lanes of another group find their place beside these.
LaneRoom lane_room(uint64_t bytes, uint64_t shared, uint32_t size, const Room& room) {
  const uint64_t of_slots = lane_mailbox_bytes(1, size, 1);
  const uint64_t resident = blocks_for(Work::exchange, ~uint64_t{0} / 2, room);
  LaneRoom made;
  made.lanes = static_cast<uint32_t>(std::clamp<uint64_t>(
      std::min(resident / 2, shared / (of_slots * kLeastSlotBytes)), 1, kMostLanes));
  made.mailbox_bytes = std::min(shared, made.lanes * of_slots * kMostSlotBytes);
  const uint64_t rounding = (size + kScratchOfLane) * (made.lanes + 1) * kAccessBytes;
  const uint64_t rest = bytes - made.mailbox_bytes;
  made.piece_bytes = (rest - rounding) / (1 + kScratchOfPiece) / kWholePacks * kWholePacks;
  made.scratch_bytes = rest - made.piece_bytes;
  return made;
}

}  // namespace farandole::cuda
