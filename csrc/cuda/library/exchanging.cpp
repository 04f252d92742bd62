#include "cuda/library/exchanging.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/library/exchange.h"
#include "cuda/library/guarded.h"
#include "cuda/library/kernel_image.h"

/// Opaque outside.
struct farandole::CudaExchange {
  cuda::Exchange exchange;
};
struct farandole::CudaMoments {
  std::unique_ptr<cuda::Moments> moments;
};

namespace farandole::cuda {
namespace {

/// Exchanges of worlds that have ended, which graphs may still use.
struct KeptForGraphs {
  std::mutex mutex;  // guards all
  std::vector<std::unique_ptr<CudaExchange>> all;

  void sweep() {
    const std::lock_guard lock(mutex);
    std::erase_if(all, [](const auto& kept) { return !kept->exchange.has_graphs(); });
  }
  void add(std::unique_ptr<CudaExchange> exchange) {
    const std::lock_guard lock(mutex);
    all.push_back(std::move(exchange));
  }
};
KeptForGraphs& kept_for_graphs() {
  static auto* const one = new KeptForGraphs;
  return *one;
}

CudaExchange* open_exchange(const CudaExchangeShape* shape, CudaFailure* failure) {
  return guarded(failure, [&] {
    kept_for_graphs().sweep();
    const auto context = DeviceContext::retain(Driver::of_process(), shape->device);
    return new CudaExchange{{context, *shape}};
  });
}

const void* image_of_this_build() {
  if (kernel_image() == nullptr)
    throw Error(ErrorCode::device,
                "this build of farandole has no kernels: it had no compiler for them");
  return kernel_image();
}

int32_t open_bucket(CudaExchange* exchange, CudaShare* mine, int32_t* descriptor,
                    CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.open_bucket(image_of_this_build());
    MemoryExport shared = exchange->exchange.share();
    *mine = {shared.id.process,
             shared.id.number,
             shared.bytes,
             {},
             static_cast<int32_t>(exchange->exchange.multiprocessors()),
             shared.kind == ExportKind::ipc ? 1 : 0,
             exchange->exchange.takes_turns() ? 1 : 0,
             exchange->exchange.device().multicast ? 1 : 0,
             {}};
    std::memcpy(mine->device, shared.device.bytes, sizeof mine->device);
    static_assert(sizeof mine->handle == sizeof shared.handle);
    std::memcpy(mine->handle, &shared.handle, sizeof mine->handle);
    *descriptor = shared.descriptor.release();
    return 1;
  });
}

int32_t map_peer(CudaExchange* exchange, int32_t rank, const CudaShare* theirs, int32_t descriptor,
                 CudaFailure* failure) {
  return guarded(failure, [&] {
    MemoryExport shared;
    shared.id = {theirs->process, theirs->number};
    shared.bytes = theirs->bytes;
    std::memcpy(shared.device.bytes, theirs->device, sizeof theirs->device);
    if (theirs->by_handle != 0) {
      shared.kind = ExportKind::ipc;
      std::memcpy(&shared.handle, theirs->handle, sizeof shared.handle);
    } else {
      shared.descriptor = Fd(checked(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0), "fcntl"));
    }
    exchange->exchange.map(static_cast<uint32_t>(rank), shared,
                           static_cast<uint32_t>(theirs->multiprocessors),
                           theirs->takes_turns != 0);
    return exchange->exchange.writes_words() ? 1 : 2;
  });
}

int32_t prove_links(CudaExchange* exchange, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.prove_links();
    return 1;
  });
}

int32_t look_at_links(CudaExchange* exchange, CudaLinks* links, CudaFailure* failure) {
  return guarded(failure, [&] {
    bool words = false;
    links->proved = exchange->exchange.links_are_proved(words) ? 1 : 0;
    links->words = words ? 1 : 0;
    return 1;
  });
}

void write_by_kernels(CudaExchange* exchange) { exchange->exchange.write_by_kernels(); }

void let_go_of_peers(CudaExchange* exchange) { exchange->exchange.let_go_of_peers(); }

void close_exchange(CudaExchange* exchange) {
  std::unique_ptr<CudaExchange> closing(exchange);
  if (closing->exchange.has_graphs()) {
    closing->exchange.give_up_graphs();
    kept_for_graphs().add(std::move(closing));
  }
  kept_for_graphs().sweep();
}

CudaMoments* open_moments(CudaExchange* exchange, const uint64_t* streams, uint64_t count,
                          int32_t timed, CudaFailure* failure) {
  return guarded(failure, [&] {
    std::vector<StreamHandle> handles;
    for (const uint64_t stream : std::span(streams, count))
      handles.push_back(std::bit_cast<StreamHandle>(stream));
    return new CudaMoments{
        exchange->exchange.moments(handles, timed != 0 ? Timing::on : Timing::off)};
  });
}

void close_moments(CudaExchange* exchange, CudaMoments* moments) {
  exchange->exchange.give_back(std::move(moments->moments));
  delete moments;
}

int32_t begin(CudaExchange* exchange, CudaMoments* moments, uint64_t pieces, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.begin(*moments->moments, pieces);
    return 1;
  });
}

int32_t run(CudaExchange* exchange, const CudaPiece* piece, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.run(*piece);
    return 1;
  });
}

uint64_t spin_bytes(const CudaExchange* exchange, int32_t granted) {
  return exchange->exchange.spin_bytes(granted != 0);
}

int32_t spin(CudaExchange* exchange, const CudaPiece* piece, int32_t granted,
             CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.spin(*piece, granted != 0);
    return 1;
  });
}

void lane_room(const CudaExchange* exchange, int32_t granted, CudaLaneRoom* room) {
  const LaneRoom found = exchange->exchange.lane_room(granted != 0);
  *room = {static_cast<int32_t>(found.lanes), found.piece_bytes};
}

int32_t run_lanes(CudaExchange* exchange, const CudaLanes* lanes, const CudaPiece* piece,
                  int32_t granted, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.run_lanes(*lanes, *piece, granted != 0);
    return 1;
  });
}

int32_t end(CudaExchange* exchange, CudaMoments* moments, uint32_t* number, CudaFailure* failure) {
  return guarded(failure, [&] {
    *number = exchange->exchange.end(*moments->moments);
    return 1;
  });
}

int32_t take_turns(const CudaExchange* exchange) { return exchange->exchange.take_turns(); }

int32_t has_room(const CudaExchange* exchange) { return exchange->exchange.has_room(); }

int32_t is_complete(const CudaExchange* exchange, uint32_t number) {
  return exchange->exchange.is_complete(number);
}

int32_t times_of(const CudaMoments* moments, CudaTimes* times, CudaFailure* failure) {
  return guarded(failure, [&] {
    const Moments& those = *moments->moments;
    if (!those.since) throw Error(ErrorCode::invalid_argument, "these moments are not timed");
    const auto by_host = [&](const DeviceEvent& event) -> int64_t {
      return those.since->time_of(event).time_since_epoch().count();
    };
    const int64_t begun = by_host(*those.begun);
    *times = {those.streams > 0 ? by_host(those.ready[0]) : begun, begun, by_host(those.complete)};
    for (size_t i = 1; i < those.streams; ++i)
      times->ready = std::max(times->ready, by_host(those.ready[i]));
    return 1;
  });
}

int32_t ring_after(CudaExchange* exchange, const CudaMoments* moments, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.ring_after(*moments->moments);
    return 1;
  });
}

int32_t complete_before(CudaExchange* exchange, const CudaMoments* moments, uint64_t stream,
                        CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.complete_before(*moments->moments, std::bit_cast<StreamHandle>(stream));
    return 1;
  });
}

int32_t look_for_lost_exchange(CudaExchange* exchange, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.is_idle();
    return 1;
  });
}

int32_t look_for_late(CudaExchange* exchange, CudaLate* late, CudaFailure* failure) {
  return guarded(failure, [&] {
    const auto found = exchange->exchange.look_for_late();
    *late = {found.has_value(), found.value_or(0)};
    return 1;
  });
}

int32_t drain(CudaExchange* exchange, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.drain();
    return 1;
  });
}

// ---- in graphs ----

int32_t begin_captured(CudaExchange* exchange, uint64_t stream, uint32_t number,
                       CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.captured().begin(std::bit_cast<StreamHandle>(stream), number);
    return 1;
  });
}

int32_t end_captured(CudaExchange* exchange, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.captured().end();
    return 1;
  });
}

int32_t graphs_are_wrong(const CudaExchange* exchange) {
  return exchange->exchange.captured().is_wrong();
}

void give_up_graphs(CudaExchange* exchange) { exchange->exchange.give_up_graphs(); }

void graph_state(const CudaExchange* exchange, CudaGraphState* state) {
  *state = exchange->exchange.captured().state();
}

// ---- NCCL ----

int32_t make_nccl_id(CudaNcclId* id, CudaFailure* failure) {
  return guarded(failure, [&] {
    *id = NcclCommunicator::make_id();
    return 1;
  });
}

int32_t open_nccl(CudaExchange* exchange, const CudaNcclId* id, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.open_nccl(*id);
    return 1;
  });
}

int32_t nccl_ready(CudaExchange* exchange, int32_t* ready, CudaFailure* failure) {
  return guarded(failure, [&] {
    *ready = exchange->exchange.nccl()->ready();
    return 1;
  });
}

int32_t load_scales(CudaExchange* exchange, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.load_scales(image_of_this_build());
    return 1;
  });
}

int32_t run_nccl(CudaExchange* exchange, const CudaNcclJob* job, CudaFailure* failure) {
  return guarded(failure, [&] {
    exchange->exchange.run_nccl(*job);
    return 1;
  });
}

int32_t look_for_nccl_failure(CudaExchange* exchange, CudaFailure* failure) {
  return guarded(failure, [&] {
    if (NcclCommunicator* const nccl = exchange->exchange.nccl()) nccl->look_for_failure();
    return 1;
  });
}

void abort_nccl(CudaExchange* exchange) {
  if (NcclCommunicator* const nccl = exchange->exchange.nccl()) nccl->abort();
}

}  // namespace

void add_exchanging(CudaTable& table) {
  table.open_exchange = open_exchange;
  table.open_bucket = open_bucket;
  table.map_peer = map_peer;
  table.prove_links = prove_links;
  table.look_at_links = look_at_links;
  table.write_by_kernels = write_by_kernels;
  table.let_go_of_peers = let_go_of_peers;
  table.close_exchange = close_exchange;
  table.open_moments = open_moments;
  table.close_moments = close_moments;
  table.begin = begin;
  table.run = run;
  table.spin_bytes = spin_bytes;
  table.spin = spin;
  table.lane_room = lane_room;
  table.run_lanes = run_lanes;
  table.end = end;
  table.take_turns = take_turns;
  table.has_room = has_room;
  table.is_complete = is_complete;
  table.times_of = times_of;
  table.ring_after = ring_after;
  table.complete_before = complete_before;
  table.look_for_lost_exchange = look_for_lost_exchange;
  table.look_for_late = look_for_late;
  table.drain = drain;
  table.begin_captured = begin_captured;
  table.end_captured = end_captured;
  table.graph_state = graph_state;
  table.graphs_are_wrong = graphs_are_wrong;
  table.give_up_graphs = give_up_graphs;
  table.make_nccl_id = make_nccl_id;
  table.open_nccl = open_nccl;
  table.nccl_ready = nccl_ready;
  table.load_scales = load_scales;
  table.run_nccl = run_nccl;
  table.look_for_nccl_failure = look_for_nccl_failure;
  table.abort_nccl = abort_nccl;
}

}  // namespace farandole::cuda
