#include "devices/exchange.h"

#include <fcntl.h>

#include <bit>
#include <mutex>
#include <utility>
#include <vector>

#include "base/log.h"
#include "cuda/exchange/kernel_image.h"

namespace farandole {
namespace {

constexpr uint32_t kWordsAreLost = 1;  // a note of a check

/// Exchanges of worlds that have ended, which graphs may still use.
struct KeptForGraphs {
  std::mutex mutex;  // guards all
  std::vector<std::unique_ptr<DeviceExchange>> all;

  void sweep() {
    const std::lock_guard lock(mutex);
    std::erase_if(all, [](const auto& kept) { return !kept->has_graphs(); });
  }
  void add(std::unique_ptr<DeviceExchange> exchange) {
    const std::lock_guard lock(mutex);
    all.push_back(std::move(exchange));
  }
};

KeptForGraphs& kept_for_graphs() {
  static auto* const one = new KeptForGraphs;
  return *one;
}

void close(DeviceExchange* exchange) {
  std::unique_ptr<DeviceExchange> closing(exchange);
  if (closing->has_graphs()) {
    closing->give_up_graphs();
    kept_for_graphs().add(std::move(closing));
  }
  closing.reset();
  kept_for_graphs().sweep();
}

}  // namespace

std::shared_ptr<DeviceExchange> DeviceExchange::open(const CudaExchangeShape& shape) {
  kept_for_graphs().sweep();
  const auto context = cuda::DeviceContext::retain(cuda::Driver::of_process(), shape.device);
  return {new DeviceExchange(context, shape), close};
}

PeerOffer DeviceExchange::offer_bucket() {
  open_bucket(cuda::kernel_image());
  cuda::MemoryExport shared = share();
  PeerOffer mine;
  mine.put(BucketOffer{.id = shared.id,
                       .bytes = shared.bytes,
                       .device = shared.device,
                       .multiprocessors = multiprocessors(),
                       .by_handle = shared.kind == cuda::ExportKind::ipc,
                       .takes_turns = takes_turns(),
                       .multicast = device().multicast,
                       .handle = shared.handle});
  mine.descriptor = std::move(shared.descriptor);
  return mine;
}

void DeviceExchange::map_all(int own, std::span<const PeerOffered> all) {
  for (size_t r = 0; r < all.size(); ++r) {
    if (r == static_cast<size_t>(own)) continue;
    const auto theirs = all[r].get<BucketOffer>();
    cuda::MemoryExport shared{
        .id = theirs.id,
        .device = theirs.device,
        .bytes = theirs.bytes,
        .kind = theirs.by_handle ? cuda::ExportKind::ipc : cuda::ExportKind::descriptor,
        .handle = theirs.handle,
        .descriptor = {}};
    if (!theirs.by_handle)
      shared.descriptor = Fd(checked(::fcntl(all[r].descriptor, F_DUPFD_CLOEXEC, 0), "fcntl"));
    map(static_cast<uint32_t>(r), shared, theirs.multiprocessors, theirs.takes_turns);
  }
  if (!writes_words())
    log(LogLevel::info, "the driver lets no stream write to other ranks' memory: kernels do so");
  prove_links();
}

std::optional<uint32_t> DeviceExchange::check_links() {
  bool words = false;
  if (!links_are_proved(words)) return std::nullopt;
  return words ? 0 : kWordsAreLost;
}

void DeviceExchange::heed(uint32_t notes) {
  if ((notes & kWordsAreLost) == 0) return;
  log(LogLevel::warning,
      "what streams write to other ranks' devices does not arrive: kernels do so");
  write_by_kernels();
}

StepMoments DeviceExchange::moments_after(const std::set<uint64_t>& streams, bool timed) {
  std::vector<cuda::StreamHandle> handles;
  for (const uint64_t stream : streams)
    handles.push_back(std::bit_cast<cuda::StreamHandle>(stream));
  auto made = moments(handles, timed ? cuda::Timing::on : cuda::Timing::off);
  return {made.release(), [self = shared_from_this()](cuda::Moments* moments) {
            self->give_back(std::unique_ptr<cuda::Moments>(moments));
          }};
}

bool DeviceExchange::scales_results() {
  try {
    load_scales(cuda::kernel_image());
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::forked) throw;
    log(LogLevel::info, "NCCL scales the inputs of means: " + error.verdict());
    return false;
  }
}

}  // namespace farandole
