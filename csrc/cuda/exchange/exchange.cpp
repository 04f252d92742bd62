#include "cuda/exchange/exchange.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <thread>
#include <utility>

namespace farandole::cuda {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
constexpr uint64_t kFlagBytes = whole_pages(sizeof(Flags));
/// A mailbox has 512 KiB for each rank, and every rank writes to all.
constexpr uint32_t kMostRanksThatSpin = 16;
/// Farther than any meeting that has been asked for.
constexpr uint32_t kFar = 1U << 30;
constexpr auto kBetweenDrains = std::chrono::milliseconds(1);
constexpr int kDrainsOfGraphs = 3;
/// Each is two calls in the stream of marks, and so is each mark of a backlog.
constexpr uint32_t kMostOperations = 128;
static_assert(2 * kMostRanks < 256);  // words of a meeting

/// Buckets of ranks that are threads of this process, by their ids: they have an address here.
struct Local {
  std::mutex mutex;  // guards all
  std::map<AllocationId, std::weak_ptr<const DeviceAddress>> all;
};
Local& local() {
  static auto* const one = new Local;
  return *one;
}

uint64_t strand_bytes_of(const CudaExchangeShape& shape) { return whole_pages(shape.bucket_bytes); }

uint64_t mailbox_bytes_of(const CudaExchangeShape& shape) {
  const auto size = static_cast<uint32_t>(shape.size);
  return shape.spins && size > 1 && size <= kMostRanksThatSpin ? mailbox_bytes(size) : 0;
}

std::shared_ptr<const DeviceAddress> find_local(const AllocationId& id) {
  const std::lock_guard lock(local().mutex);
  const auto found = local().all.find(id);
  auto bucket = found != local().all.end() ? found->second.lock() : nullptr;
  if (!bucket) throw Error(ErrorCode::internal, "a peer's bucket is gone");
  return bucket;
}

std::shared_ptr<DeviceMemory> make_bucket(const std::shared_ptr<const DeviceContext>& context,
                                          uint64_t bytes) {
  std::shared_ptr<DeviceMemory> bucket = allocate_device(context, bytes, Sharing::processes);
  const std::lock_guard lock(local().mutex);
  std::erase_if(local().all, [](const auto& entry) { return entry.second.expired(); });
  local().all[bucket->id()] = bucket;
  return bucket;
}

}  // namespace

Exchange::Exchange(const std::shared_ptr<const DeviceContext>& context,
                   const CudaExchangeShape& shape)
    : context_(context),
      rank_(static_cast<uint32_t>(shape.rank)),
      size_(static_cast<uint32_t>(shape.size)),
      strand_bytes_(strand_bytes_of(shape)),
      link_blocks_(shape.link_blocks),
      in_graphs_(shape.captured),
      doorbell_(checked(::fcntl(shape.doorbell, F_DUPFD_CLOEXEC, 0), "fcntl")),
      lane_flag_bytes_(shape.spins ? whole_pages(sizeof(LaneFlags)) : 0),
      mailbox_bytes_(mailbox_bytes_of(shape)),
      mappings_(context),
      peers_(size_),
      devices_(size_, context->device().uuid),
      processes_(size_, takes_turns() ? own_process() : 0),
      least_multiprocessors_(multiprocessors()),
      arrivals_(context),
      abort_(context, sizeof(uint32_t)),
      completions_(context),
      clock_(context),
      marks_(context),
      rescue_(context),
      strands_{Strand(context), Strand(context)} {}

void Exchange::open_bucket(const void* image) {
  module_ = DeviceModule::load(context_, image);
  arrive_.emplace(module_->function("farandole_arrive"));
  load_kernels();
  if (!in_graphs_)
    scratch_ = allocate_device(context_, kCudaStrands * scratch_bytes(), Sharing::none);
  tables_.emplace(context_);
  if (lane_flag_bytes_ > 0) lane_tables_.emplace(context_, rank_, size_);
  bucket_ = make_bucket(context_, bucket_bytes());
  // Before any peer can arrive: it learns of the bucket afterwards.
  marks_.fill(bucket_->address(), 0, 2 * kFlagBytes + lane_flag_bytes_);
  if (!marks_.try_wait(bucket_->address(), 0)) await_.emplace(module_->function("farandole_await"));
  peers_[rank_] = bucket_;
  writes_words_ = !await_ && writes_words_of(rank_);
  proof_.emplace(context_, rank_, size_, strand_bytes_);
  know(rank_, share());
  proof_->show(marks_, copying());
  if (in_graphs_) open_for_graphs();
}

/// In a graph pieces come one after the other.
uint64_t Exchange::bucket_bytes() const {
  return 2 * kFlagBytes + lane_flag_bytes_ + mailbox_bytes_ +
         (in_graphs_ ? 1 : kCudaStrands) * strand_bytes_;
}

/// Graphs live as long as their programs like: nobody can be the last to let go of their memory.
void Exchange::open_for_graphs() {
  if (await_)
    throw Error(ErrorCode::device, context_->device().label() +
                                       " cannot let streams wait for words, which collectives in "
                                       "CUDA graphs need");
  if (share().kind == ExportKind::ipc)
    throw Error(ErrorCode::device, "memory of " + context_->device().label() +
                                       " cannot be shared by file descriptors, which collectives "
                                       "in CUDA graphs need");
  // Kernels that spin have no use for their flags here.
  captured_.emplace(context_, *module_, reinterpret_cast<GraphCounts*>(spin_flags_of(rank_)));
}

Exchange::~Exchange() { finish(); }

/// Its streams are done.
void Exchange::finish() noexcept {
  try {
    while (!is_idle()) {
      if (open_ || !is_complete(newest_)) drain();  // else it waits for nobody, but for the mark
      std::this_thread::sleep_for(kBetweenDrains);
    }
  } catch (const Error&) {  // NOLINT: nothing waits in a lost context, or in a forked child
  }
}

void Exchange::give_up_graphs() noexcept {
  try {  // a rank that is late may undo it once
    for (int drains = 0; drains < kDrainsOfGraphs; ++drains) {
      drain();
      std::this_thread::sleep_for(kBetweenDrains);
    }
  } catch (const Error&) {  // NOLINT: likewise
  }
}

uint32_t Exchange::multiprocessors() const {
  return static_cast<uint32_t>(context_->device().multiprocessors);
}

bool Exchange::takes_turns() const { return !context_->device().by_mps; }

bool Exchange::take_turns() const {
  for (uint32_t one = 0; one < size_; ++one)
    for (uint32_t other = 0; other < one; ++other)
      if (devices_[one] == devices_[other] && processes_[one] != processes_[other]) return true;
  return false;
}

void Exchange::map(uint32_t rank, const MemoryExport& theirs, uint32_t multiprocessors,
                   bool takes_turns) {
  if (theirs.bytes < bucket_bytes())
    throw Error(ErrorCode::internal, "a peer's bucket is smaller than ours");
  if (await_ && theirs.device == context_->device().uuid)
    throw Error(ErrorCode::device,
                context_->device().label() +
                    " cannot let streams wait for words, and other ranks have it, too",
                {}, "let each rank have a device of its own");
  devices_.at(rank) = theirs.device;
  processes_.at(rank) = takes_turns ? theirs.id.process : 0;
  least_multiprocessors_ = std::min(least_multiprocessors_, multiprocessors);
  peers_.at(rank) =
      theirs.id.process == own_process() ? find_local(theirs.id) : mappings_.map(theirs);
  know(rank, theirs);
  if (theirs.id.process == own_process()) return;
  writes_words_ = writes_words_ && writes_words_of(rank);
  marks_.synchronize();
}

void Exchange::know(uint32_t rank, const MemoryExport& bucket) {
  proof_->know(rank, bucket.id, bucket.device, bucket_of(rank, 0));
}

const DeviceFunction& Exchange::copying() const {
  return kernel(kernel_name("fold", DType::uint32));
}

void Exchange::prove_links() { proof_->write(marks_, copying(), writes_words_); }

bool Exchange::links_are_proved(bool& words) { return proof_->has_come(marks_, words); }

/// Tries it with a word that this rank has not come to, and nobody waits for yet. Drivers refuse it
/// with various codes.
bool Exchange::writes_words_of(uint32_t rank) {
  WordBatch batch;
  batch.write(address_of(&flags_of(rank)->arrived[0][rank_]), 0);
  try {
    marks_.batch(std::move(batch));
    return true;
  } catch (const Error&) {
    if (context_->lost()) throw;
    return false;
  }
}

void Exchange::let_go_of_peers() noexcept {
  finish();
  for (uint32_t r = 0; r < size_; ++r)
    if (r != rank_) peers_[r] = nullptr;
  let_go_ = true;
}

// ---- moments ----

std::unique_ptr<Moments> Exchange::moments(const std::vector<StreamHandle>& streams,
                                           Timing timing) {
  const DeviceContext::Use all_calls(*context_);
  std::unique_ptr<Moments> taken;
  {
    const std::lock_guard lock(mutex_);
    if (timing == Timing::on) {
      taken = std::make_unique<Moments>(context_, timing);
      taken->since = clock_.mark();  // before all events that are compared with it
    } else if (!spare_.empty()) {
      taken = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (!taken) taken = std::make_unique<Moments>(context_);
  taken->streams = streams.size();
  while (taken->ready.size() < streams.size()) taken->ready.emplace_back(context_, timing);
  for (size_t i = 0; i < streams.size(); ++i) {
    const StreamRef users(context_, streams[i]);
    users.refuse_capture();
    taken->ready[i].record(users);
  }
  return taken;
}

void Exchange::give_back(std::unique_ptr<Moments> moments) {
  if (moments->since) return;
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(moments));
}

// ---- an operation ----

/// Every strand begins behind what the first one had before: operations come one after the other.
void Exchange::begin(Moments& moments, uint64_t strands) {
  const DeviceContext::Use all_calls(*context_);
  if (let_go_) throw Error(ErrorCode::internal, "another rank's device has left this exchange");
  open_ = true;
  unpack_.clear();  // of one that was aborted
  strands_used_ = std::min<uint64_t>(strands, strands_.size());
  Strand& first = strands_[0];
  for (size_t i = 0; i < moments.streams; ++i) first.stream.wait(moments.ready[i]);
  tells_itself_ = false;
  timed_ = moments.begun.has_value();
  if (timed_) moments.begun->record(first.stream);
  for (size_t i = 1; i < strands_used_; ++i) {
    strands_[i].edge.record(first.stream);
    strands_[i].stream.wait(strands_[i].edge);
  }
}

uint32_t Exchange::end(Moments& moments) {
  const DeviceContext::Use all_calls(*context_);
  Strand& first = strands_[0];
  move(0, std::exchange(unpack_, {}), unpack_as_);
  for (size_t i = 1; i < strands_used_; ++i) {
    strands_[i].edge.record(strands_[i].stream);
    first.stream.wait(strands_[i].edge);
  }
  moments.complete.record(first.stream);
  // Comes last: a thread that sees the mark may ask for the moments' times.
  if (!tells_itself_) newest_ = completions_.mark(first.stream);
  note(0);
  if (tables_) tables_->end(newest_, completions_);
  if (lane_tables_) lane_tables_->end(newest_);
  open_ = false;
  return newest_;
}

void Exchange::note(int32_t strand) {
  if (captured_) return;
  Strand& here = strands_.at(static_cast<size_t>(strand));
  if (here.backlog.note(here.stream)) ring_behind(here);  // an operation may wait for room
}

/// In a stream of its own: a function of the host would hold up what follows in the strand's.
void Exchange::ring_behind(Strand& strand) {
  strand.edge.record(strand.stream);
  marks_.wait(strand.edge);
  marks_.ring(doorbell_.get());
}

CudaTimes Exchange::times_of(const Moments& moments) {
  if (!moments.since) throw Error(ErrorCode::invalid_argument, "these moments are not timed");
  const auto by_host = [&](const DeviceEvent& event) -> int64_t {
    return moments.since->time_of(event).time_since_epoch().count();
  };
  const int64_t begun = by_host(*moments.begun);
  CudaTimes times{moments.streams > 0 ? by_host(moments.ready[0]) : begun, begun,
                  by_host(moments.complete)};
  for (size_t i = 1; i < moments.streams; ++i)
    times.ready = std::max(times.ready, by_host(moments.ready[i]));
  return times;
}

void Exchange::ring_after(const Moments& moments) {
  const DeviceContext::Use all_calls(*context_);
  marks_.wait(moments.complete);
  marks_.ring(doorbell_.get());
}

bool Exchange::has_room() const {
  return completions_.reached(newest_ - kMostOperations) &&
         (!tables_ || tables_->has_room(completions_)) &&
         std::ranges::all_of(strands_, [](const Strand& s) { return s.backlog.has_room(); });
}

void Exchange::complete_before(const Moments& moments, StreamHandle stream) const {
  const DeviceContext::Use all_calls(*context_);
  const StreamRef users(context_, stream);
  users.refuse_capture();
  users.wait(moments.complete);
}

DevicePointer Exchange::bucket_of(uint32_t rank, int32_t strand) const {
  return mailbox_of(rank) + mailbox_bytes_ + static_cast<uint64_t>(strand) * strand_bytes_;
}

DevicePointer Exchange::mailbox_of(uint32_t rank) const {
  return peers_[rank]->address() + 2 * kFlagBytes + lane_flag_bytes_;
}

Flags* Exchange::flags_of(uint32_t rank) const {
  return std::bit_cast<Flags*>(static_cast<uintptr_t>(peers_[rank]->address()));
}
Flags* Exchange::spin_flags_of(uint32_t rank) const {
  return std::bit_cast<Flags*>(static_cast<uintptr_t>(peers_[rank]->address() + kFlagBytes));
}
LaneFlags* Exchange::lane_flags_of(uint32_t rank) const {
  return std::bit_cast<LaneFlags*>(
      static_cast<uintptr_t>(peers_[rank]->address() + 2 * kFlagBytes));
}
const StreamRef& Exchange::stream_of(int32_t strand) const {
  if (captured_) return captured_->stream();
  return strands_.at(static_cast<size_t>(strand)).stream;
}
Peers Exchange::peers() const {
  Peers all{.rank = rank_, .size = size_};
  all.abort = abort_word();
  for (uint32_t r = 0; r < size_; ++r) all.flags[r] = flags_of(r);
  return all;
}
const uint32_t* Exchange::abort_word() const {
  return std::bit_cast<const uint32_t*>(static_cast<uintptr_t>(abort_.address()));
}

/// Orders the work now in the strand's stream before later work in everybody's streams.
void Exchange::meet(int32_t strand) {
  if (captured_) return captured_->meet(peers());
  Strand& here = strands_[static_cast<size_t>(strand)];
  if (writes_words_) return meet_by_words(here, strand);
  const Meet at{.peers = peers(), .channel = static_cast<uint32_t>(strand)};
  arrive_->launch(here.stream, {.blocks = 1, .threads = 64}, at);
  ++here.met;
  if (await_) return await_->launch(here.stream, {.blocks = 1, .threads = 64}, at);
  for (uint32_t r = 0; r < size_; ++r)
    if (r != rank_) here.stream.wait(address_of(&flags_of(rank_)->arrived[strand][r]), here.met);
}

/// Writes the words of farandole_arrive, and waits for the others': one call of the driver.
void Exchange::meet_by_words(Strand& here, int32_t strand) {
  const uint32_t met = here.met + 1;
  WordBatch batch;
  for (uint32_t i = 1; i < size_; ++i)
    batch.write(address_of(&flags_of((rank_ + i) % size_)->arrived[strand][rank_]), met);
  batch.write(address_of(&flags_of(rank_)->epoch[strand]), met);
  for (uint32_t r = 0; r < size_; ++r)
    if (r != rank_) batch.wait(address_of(&flags_of(rank_)->arrived[strand][r]), met);
  here.stream.batch(std::move(batch));
  here.met = met;
}

void Exchange::open_nccl(const CudaNcclId& id) {
  nccl_.emplace(context_, id, static_cast<int>(rank_), static_cast<int>(size_));
}

// ---- when ranks fail ----

bool Exchange::is_idle() const {
  bool idle = marks_.idle();
  for (const Strand& strand : strands_) idle &= strand.stream.idle();
  return idle;
}

std::optional<RankBits> Exchange::look_for_late() {
  if (!peers_[rank_] || !rescue_.idle()) return std::nullopt;
  std::optional<RankBits> found;
  if (arrivals_.asked())
    found = arrivals_.late(rank_, size_, {strands_[0].met, strands_[1].met}, spun_);
  arrivals_.ask(rescue_, flags_of(rank_), spin_flags_of(rank_));
  return found;
}

void Exchange::drain() {
  if (nccl_) nccl_->abort();
  if (!peers_[rank_]) return;
  if (captured_) return captured_->drain(rescue_, flags_of(rank_));
  // First: what the streams go on with looks at it.
  std::atomic_ref(*reinterpret_cast<uint32_t*>(abort_.host())).store(1, std::memory_order_release);
  for (size_t strand = 0; strand < strands_.size(); ++strand)
    rescue_.fill_words(address_of(&flags_of(rank_)->arrived[strand][0]),
                       strands_[strand].met + kFar, kMostRanks);
}

}  // namespace farandole::cuda
