#include "cuda/exchange/captured_steps.h"

#include <atomic>
#include <bit>

namespace farandole::cuda {
namespace {

constexpr uint32_t kGraphChannels = 2;
constexpr uint32_t kArrived = 1;  // the bit that every tag has

}  // namespace

CapturedSteps::CapturedSteps(const std::shared_ptr<const DeviceContext>& context,
                             const DeviceModule& module, GraphCounts* counts)
    : context_(context),
      begin_(module.function("farandole_graph_begin")),
      end_(module.function("farandole_graph_end")),
      arrive_(module.function("farandole_graph_arrive")),
      pass_(module.function("farandole_graph_pass")),
      counts_(counts),
      words_(context, sizeof(GraphWords)),
      graphs_(std::make_shared<std::atomic<int>>(0)) {}

void CapturedSteps::begin(StreamHandle stream, uint32_t number) {
  const StreamRef captured(context_, stream);
  if (!captured.is_captured())
    throw Error(ErrorCode::invalid_argument,
                "the capture of a CUDA graph ended while a collective was to become part of it");
  count_in(captured);
  stream_.emplace(captured);
  tag_ = graph_tag(number);
  met_ = 0;
  begin_.launch(*stream_, {.blocks = 1, .threads = 1}, collective());
}

/// Until that graph is gone.
void CapturedSteps::count_in(const StreamRef& captured) {
  using Count = std::shared_ptr<std::atomic<int>>;
  auto held = std::make_unique<Count>(graphs_);
  const auto gone = [](void* user) { --**std::unique_ptr<Count>(static_cast<Count*>(user)); };
  ++*graphs_;
  try {
    if (captured.when_graph_is_gone(gone, held.get())) [[maybe_unused]]
      Count* const the_graphs = held.release();
  } catch (...) {  // nothing of it is in the graph
    --*graphs_;
    throw;
  }
}

void CapturedSteps::end() { end_.launch(*stream_, {.blocks = 1, .threads = 1}, collective()); }

GraphCollective CapturedSteps::collective() const {
  return {.tag = tag_, .counts = counts_, .words = words_there()};
}

GraphWords* CapturedSteps::words_there() const {
  return std::bit_cast<GraphWords*>(static_cast<uintptr_t>(words_.address()));
}

void CapturedSteps::meet(const Peers& peers) {
  const GraphMeet at{.peers = peers,
                     .channel = met_++ % kGraphChannels,
                     .tag = tag_,
                     .counts = counts_,
                     .words = words_there()};
  arrive_.launch(*stream_, {.blocks = 1, .threads = 64}, at);
  for (uint32_t r = 0; r < peers.size; ++r)
    if (r != peers.rank)
      stream_->wait_for_bits(address_of(&peers.flags[peers.rank]->arrived[at.channel][r]),
                             kArrived);
  pass_.launch(*stream_, {.blocks = 1, .threads = 64}, at);
}

/// Written by kernels.
uint32_t CapturedSteps::word(const uint32_t& of) {
  return std::atomic_ref(const_cast<uint32_t&>(of)).load(std::memory_order_acquire);
}

CudaGraphState CapturedSteps::state() const {
  const GraphWords& now = words();
  CudaGraphState state{.begun = 0,
                       .ended = word(now.ended),
                       .at = 0,
                       .overlaps = word(now.overlaps) != 0,
                       .differs = -1,
                       .own = 0,
                       .theirs = 0};
  state.begun = word(now.begun);  // after what has ended
  state.at = number_of_tag(word(now.at));
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

void CapturedSteps::drain(const StreamRef& stream, const Flags* own) const {
  stream.fill_words(address_of(&counts_->given_up), 1, 1);
  for (uint32_t channel = 0; channel < kGraphChannels; ++channel)
    stream.fill_words(address_of(&own->arrived[channel][0]), kPassesAll, kMostRanks);
}

}  // namespace farandole::cuda
