#include "devices/exchange.h"

#include "base/fixed_text.h"
#include "base/log.h"

namespace farandole {
namespace {

constexpr uint32_t kWordsAreLost = 1;  // a note of a check

}  // namespace

DeviceExchange::DeviceExchange(const CudaExchangeShape& shape)
    : library_(cuda_library()),
      device_(shape.device),
      exchange_(ask_cuda(library_.open_exchange, &shape), library_.close_exchange) {}

PeerOffer DeviceExchange::open_bucket() {
  PeerOffer mine;
  CudaShare share{};
  int32_t descriptor = -1;
  ask_cuda(library_.open_bucket, exchange_.get(), &share, &descriptor);
  mine.descriptor = Fd(descriptor);
  mine.put(share);
  return mine;
}

void DeviceExchange::map_all(int own, std::span<const PeerOffered> all) {
  bool by_kernels = false;
  for (int r = 0; r < static_cast<int>(all.size()); ++r) {
    const PeerOffered& offered = all[static_cast<size_t>(r)];
    const auto theirs = offered.get<CudaShare>();
    if (r != own)
      by_kernels |=
          ask_cuda(library_.map_peer, exchange_.get(), r, &theirs, offered.descriptor) > 1;
  }
  if (by_kernels)
    log(LogLevel::info, "the driver lets no stream write to other ranks' memory: kernels do so");
  ask_cuda(library_.prove_links, exchange_.get());
}

std::optional<uint32_t> DeviceExchange::check_links() {
  CudaLinks links{};
  ask_cuda(library_.look_at_links, exchange_.get(), &links);
  if (links.proved == 0) return std::nullopt;
  return links.words != 0 ? 0 : kWordsAreLost;
}

void DeviceExchange::heed(uint32_t notes) {
  if ((notes & kWordsAreLost) == 0) return;
  log(LogLevel::warning,
      "what streams write to other ranks' devices does not arrive: kernels do so");
  library_.write_by_kernels(exchange_.get());
}

int DeviceExchange::find_nccl() {
  CudaNcclLibrary found{};
  ask_cuda(library_.find_nccl, &found);
  return found.version;
}

bool DeviceExchange::scales_results() {
  try {
    ask_cuda(library_.load_scales, exchange_.get());
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::forked) throw;
    log(LogLevel::info, "NCCL scales the inputs of means: " + error.verdict());
    return false;
  }
}

std::string DeviceExchange::bus_id() const {
  CudaDevice device{};
  ask_cuda(library_.device, device_, &device);
  return text_in(device.bus_id);
}

CudaNcclId DeviceExchange::make_nccl_id() {
  CudaNcclId id{};
  ask_cuda(library_.make_nccl_id, &id);
  return id;
}

StepMoments DeviceExchange::moments(const std::set<uint64_t>& streams, bool timed) {
  const std::vector<uint64_t> all(streams.begin(), streams.end());
  return {ask_cuda(library_.open_moments, exchange_.get(), all.data(), all.size(), timed ? 1 : 0),
          [self = shared_from_this()](CudaMoments* moments) {
            self->library_.close_moments(self->exchange_.get(), moments);
          }};
}

uint32_t DeviceExchange::end(CudaMoments& moments) {
  uint32_t number = 0;
  ask_cuda(library_.end, exchange_.get(), &moments, &number);
  return number;
}

}  // namespace farandole
