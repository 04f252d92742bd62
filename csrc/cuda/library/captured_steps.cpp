#include "cuda/library/captured_steps.h"

#include <atomic>
#include <bit>

namespace farandole::cuda {
namespace {

constexpr uint32_t kGraphChannels = 2;
constexpr uint32_t kArrived = 1;  // the bit that every tag has

DevicePointer address_of(const uint32_t& word) {
  return static_cast<DevicePointer>(std::bit_cast<uintptr_t>(&word));
}

}  // namespace

CapturedSteps::CapturedSteps(const std::shared_ptr<const DeviceContext>& context,
                             const DeviceModule& module)
    : context_(context),
      arrive_(module.function("farandole_graph_arrive")),
      pass_(module.function("farandole_graph_pass")),
      words_(context, sizeof(GraphWords)) {}

void CapturedSteps::begin(StreamHandle stream, uint32_t number, uint64_t pieces) {
  const StreamRef captured(context_, stream);
  if (!captured.is_captured())
    throw Error(ErrorCode::invalid_argument,
                "the capture of a CUDA graph ended while a collective was to become part of it");
  stream_.emplace(captured);
  tag_ = graph_tag(number);
  meetings_ = 2 * pieces;
  met_ = 0;
}

void CapturedSteps::meet(const Peers& peers) {
  GraphMeet at{.peers = peers,
               .channel = static_cast<uint32_t>(met_ % kGraphChannels),
               .tag = tag_,
               .begins = met_ == 0 ? 1U : 0U,
               .ends = met_ + 1 == meetings_ ? 1U : 0U};
  at.words = std::bit_cast<GraphWords*>(static_cast<uintptr_t>(words_.address()));
  ++met_;
  arrive_.launch(*stream_, {.blocks = 1, .threads = 64}, at);
  for (uint32_t r = 0; r < peers.size; ++r)
    if (r != peers.rank)
      stream_->wait_for_bits(address_of(peers.flags[peers.rank]->arrived[at.channel][r]), kArrived);
  pass_.launch(*stream_, {.blocks = 1, .threads = 64}, at);
}

/// Written by kernels.
uint32_t CapturedSteps::word(const uint32_t& of) const {
  return std::atomic_ref(const_cast<uint32_t&>(of)).load(std::memory_order_acquire);
}

CudaGraphState CapturedSteps::state() const {
  const GraphWords& now = words();
  CudaGraphState state{.begun = 0,
                       .ended = word(now.ended),
                       .at = number_of_tag(word(now.at)),
                       .overlaps = word(now.overlaps) != 0 ? 1 : 0,
                       .differs = -1,
                       .own = 0,
                       .theirs = 0};
  state.begun = word(now.begun);  // after what has ended
  for (uint32_t r = 0; r < kMostRanks && state.differs < 0; ++r)
    if (const uint32_t theirs = word(now.theirs[r]); theirs != 0) {
      state.differs = static_cast<int32_t>(r);
      state.own = number_of_tag(word(now.own[r]));
      state.theirs = number_of_tag(theirs);
    }
  return state;
}

bool CapturedSteps::have_ended(uint32_t replays) const {
  return static_cast<int32_t>(word(words().ended) - replays) >= 0;
}

void CapturedSteps::drain(const StreamRef& stream, const Flags* own) {
  for (uint32_t channel = 0; channel < kGraphChannels; ++channel)
    stream.fill_words(address_of(own->arrived[channel][0]), kPassesAll, kMostRanks);
}

}  // namespace farandole::cuda
