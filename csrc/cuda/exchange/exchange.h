// One rank's end of an exchange whose steps are ordered by streams: a rank tells of its progress by
// a word in the others' flags, and their streams wait for that word. So no two kernels have to run
// at the same time, and ranks may share a device. Where they may count on running at once, one
// kernel that spins is quicker for little data.
//
// Streams arrive and wait by the driver (cuStreamBatchMemOp), not by kernels: a spinning block
// would fill this process's slices of the device's time, in which others cannot arrive, and to
// launch a kernel takes longer. Such a wait sees no abort word: drain() writes the flags. Where the
// driver cannot write a peer's words, a kernel does; where it cannot let streams wait, a block does
// spin, if no other rank has the device.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/driver/completion.h"
#include "cuda/driver/event.h"
#include "cuda/driver/module.h"
#include "cuda/driver/peer_memory.h"
#include "cuda/exchange/arrivals.h"
#include "cuda/exchange/captured_steps.h"
#include "cuda/exchange/device_clock.h"
#include "cuda/exchange/lane_tables.h"
#include "cuda/exchange/link_proof.h"
#include "cuda/exchange/move_tables.h"
#include "cuda/kernels/parameters.h"
#include "cuda/nccl/communicator.h"
#include "cuda/plans.h"
#include "cuda/work.h"

namespace farandole::cuda {

/// The dtypes whose kernels move any elements of 1, 2, 4 and 8 bytes.
inline constexpr std::array kOfWidth{DType::uint8, DType::uint16, DType::uint32, DType::uint64};
/// The dtypes whose results have factors by NCCL.
inline constexpr std::array kScaled{DType::float16, DType::bfloat16, DType::float32,
                                    DType::float64};

/// The events of an operation: its arrays are ready, and it is complete. Where it is timed also its
/// begin, and the mark from which the host's clock counts.
struct Moments {
  explicit Moments(const std::shared_ptr<const DeviceContext>& context, Timing timing = Timing::off)
      : complete(context, timing) {
    if (timing == Timing::on) begun.emplace(context, timing);
  }
  std::deque<DeviceEvent> ready;  // one for each stream in which arrays are made, and spare ones
  size_t streams = 0;
  DeviceEvent complete;
  std::optional<DeviceEvent> begun;
  std::shared_ptr<const ClockMark> since;
};

/// By one thread at a time, but for what says otherwise.
class Exchange {
 public:
  /// Streams alone.
  Exchange(const std::shared_ptr<const DeviceContext>& context, const CudaExchangeShape& shape);
  /// Waits until its streams are done: drains first.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// `image`: the kernels. Throws Error(device) where the device lacks what it takes.
  void open_bucket(const void* image);
  /// Then: the data with which others map it.
  MemoryExport share() const { return bucket_->share(); }
  const DeviceProperties& device() const { return context_->device(); }
  uint32_t multiprocessors() const;
  void map(uint32_t rank, const MemoryExport& theirs, uint32_t multiprocessors,
           bool takes_turns = false);
  /// Whether streams write the words of peers; else a kernel does.
  bool writes_words() const { return writes_words_; }
  void write_by_kernels() { writes_words_ = false; }
  /// Once all are mapped, and before anything begins: LinkProof's.
  void prove_links();
  bool links_are_proved(bool& words);
  /// This process, with others on its device.
  bool takes_turns() const;
  /// Whether any ranks do so with each other; once all are mapped.
  bool take_turns() const;
  /// Drains, and maps no bucket but its own any more; nothing begins afterwards.
  void let_go_of_peers() noexcept;

  /// Ready after the work now in these streams. Any thread; given back once unused. Throws
  /// Error(invalid_argument) where one of them is being captured.
  std::unique_ptr<Moments> moments(const std::vector<StreamHandle>& streams,
                                   Timing timing = Timing::off);
  void give_back(std::unique_ptr<Moments> moments);

  /// begin, run or run_lanes for each piece, or spin or run_nccl once, end: nothing waits for the
  /// device. Operations of an exchange come one after the other, each on so many strands at most.
  void begin(Moments& moments, uint64_t strands);
  void run(const CudaPiece& piece);
  /// Bytes that spin() takes, the same on all ranks, once all peers are mapped; 0: it cannot be
  /// used. `granted`: kernels of ranks that share a device may count on running at once.
  uint64_t spin_bytes(bool granted) const;
  /// In place of run(): all of a small all-reduce by one kernel, which waits for those of the other
  /// ranks. Without moves it folds `count` elements from input to output; else in this rank's
  /// bucket, between the moves.
  void spin(const CudaPiece& piece, bool granted);
  /// `granted`: as of spin_bytes().
  LaneRoom lane_room(bool granted) const;
  /// In place of run(): a collective by one kernel that interprets a schedule, and waits for those
  /// of the other ranks. With moves from and to this rank's bucket it runs there, else from input
  /// to output. Of the piece moves, dtype, operation and scales count.
  void run_lanes(const LanesAsked& asked, const CudaPiece& piece, bool granted);
  /// A number that is reached when all of it is done.
  uint32_t end(Moments& moments);
  /// Whether streams take another piece without blocking the caller: the driver would, until all
  /// ranks' devices have gone on. Asks the driver nothing.
  bool has_room() const;

  /// Whether graphs may still use it.
  bool has_graphs() const { return captured_ && captured_->has_graphs(); }
  /// Graphs that are launched from now on wait for no rank; their results mean nothing.
  void give_up_graphs() noexcept;
  /// For an exchange whose shape says so, once its bucket is open: replaces begin() and end().
  CapturedSteps& captured() { return *captured_; }
  const CapturedSteps& captured() const { return *captured_; }

  /// NcclCommunicator's. It comes to an end, and what it has in flight, by abort_nccl(), whatever
  /// others do.
  void open_nccl(const CudaNcclId& id);
  bool nccl_ready() { return nccl_->ready(); }
  void look_for_nccl_failure() {
    if (nccl_) nccl_->look_for_failure();
  }
  void abort_nccl() noexcept {
    if (nccl_) nccl_->abort();
  }
  /// The kernels that apply `finish` of a job, for an exchange without a bucket, too.
  void load_scales(const void* image);
  /// Small arrays of all-reduces travel as one: in here, out in end(), when NCCL has launched. Then
  /// results are scaled, too.
  void run_nccl(NcclPlan plan);

  /// Asks the driver nothing. Any thread.
  bool is_complete(uint32_t number) const {
    return captured_ ? captured_->have_ended(number) : completions_.reached(number);
  }
  /// For timed moments, of an operation that is complete.
  static CudaTimes times_of(const Moments& moments);
  /// The doorbell of the shape rings when the operation is complete. After end().
  void ring_after(const Moments& moments);
  /// Later work in `stream` waits for the operation. Any thread.
  void complete_before(const Moments& moments, StreamHandle stream) const;
  /// Throws the context's lasting error.
  bool is_idle() const;
  void look_for_loss() const { is_idle(); }
  /// The ranks whose devices keep the streams waiting (Arrivals::late), as soon as they are known.
  /// Asks for them anew each time, and not for graphs.
  std::optional<RankBits> look_for_late();
  /// The ranks have failed: nothing waits for others any more, and what is in flight ends, with
  /// results that mean nothing. A rank that is late may undo it: again, until all is complete.
  void drain();
  /// Keeps arrays of an incomplete operation until this ends, which waits for its streams.
  void keep(std::shared_ptr<const void> arrays) { kept_.push_back(std::move(arrays)); }

 private:
  /// A stream that takes every second piece, its part of all buckets, and its channel.
  struct Strand {
    explicit Strand(const std::shared_ptr<const DeviceContext>& context)
        : edge(context), backlog(context), stream(context) {}
    uint32_t met = 0;
    DeviceEvent edge;  // where it leaves the first strand, and comes back; or a mark of its backlog
    Backlog backlog;
    DeviceStream stream;
  };

  uint64_t bucket_bytes() const;
  void open_for_graphs();
  void finish() noexcept;
  const StreamRef& stream_of(int32_t strand) const;
  Peers peers() const;
  DevicePointer bucket_of(uint32_t rank, int32_t strand) const;
  DevicePointer mailbox_of(uint32_t rank) const;
  Flags* flags_of(uint32_t rank) const;
  Flags* spin_flags_of(uint32_t rank) const;
  LaneFlags* lane_flags_of(uint32_t rank) const;
  Peers spinning_peers() const;
  void move(int32_t strand, std::span<const Move> moves,
            const Folding& as = {.dtype = DType::uint8});
  void scale(const StreamRef& stream, const Move& one, const Folding& as);
  void move_in(const CudaPiece& piece);
  void move_out(const CudaPiece& piece);
  void meet(int32_t strand);
  void note(int32_t strand);
  void ring_behind(Strand& strand);
  void meet_by_words(Strand& here, int32_t strand);
  bool writes_words_of(uint32_t rank);
  void know(uint32_t rank, const MemoryExport& bucket);
  const DeviceFunction& copying() const;
  void fold(const CudaPiece& piece);
  void update(const CudaPiece& piece);
  void norm(const CudaPiece& piece);
  uint64_t scratch_bytes() const;
  DevicePointer pack_of(uint64_t bytes);
  CudaNcclCall pack(std::span<const CudaNcclCall> small, size_t element);
  void load(const std::string& name) { kernels_.emplace(name, module_->function(name)); }
  void load_kernels();
  const DeviceFunction& kernel(const std::string& name) const { return kernels_.at(name); }
  const uint32_t* abort_word() const;
  Room room() const;

  std::vector<std::shared_ptr<const void>> kept_;  // first: the streams have ended by then
  std::shared_ptr<const DeviceContext> context_;
  uint32_t rank_, size_;
  uint64_t strand_bytes_;
  uint64_t link_blocks_;
  bool in_graphs_;
  Fd doorbell_;                                 // a duplicate
  std::shared_ptr<const DeviceModule> module_;  // this and the next: of a bucket
  std::optional<DeviceFunction> arrive_;
  std::optional<DeviceFunction> await_;            // where streams cannot wait for words
  bool writes_words_ = false;                      // of peers; else arrive_ does
  std::map<std::string, DeviceFunction> kernels_;  // by name
  std::optional<MoveTables> tables_;               // this and the next: likewise
  std::optional<LaneTables> lane_tables_;
  uint64_t lane_flag_bytes_;  // 0: nothing spins
  uint64_t mailbox_bytes_;    // 0: there is no spin()
  std::shared_ptr<DeviceMemory>
      bucket_;  // flags, the same for kernels that spin, those of lanes, mailbox, parts of strands
  PeerMappings mappings_;
  std::vector<std::shared_ptr<const DeviceAddress>> peers_;  // by rank, this one included
  std::optional<LinkProof> proof_;                           // of a bucket
  std::vector<DeviceUuid> devices_;                          // by rank
  std::vector<uint64_t> processes_;                          // likewise; 0: it takes no turns
  uint32_t least_multiprocessors_;
  std::optional<CapturedSteps> captured_;
  Arrivals arrivals_;
  uint32_t spun_ = 0;                                 // meetings of kernels that spin
  PinnedMemory abort_;                                // a word that ends kernels which spin
  std::vector<std::unique_ptr<DeviceMemory>> packs_;  // for NCCL: the last one is used
  std::vector<Move> unpack_;                          // once it has launched
  Folding unpack_as_{.dtype = DType::uint8};          // with its last factor
  std::unique_ptr<DeviceMemory> scratch_;             // of norms, by strand
  CompletionCount completions_;
  std::mutex mutex_;  // guards the two
  std::vector<std::unique_ptr<Moments>> spare_;
  DeviceClock clock_;
  size_t strands_used_ = 0;    // by the operation in flight
  uint32_t newest_ = 0;        // mark
  bool tells_itself_ = false;  // the kernel of the operation in flight writes that mark
  bool timed_ = false;         // it is
  bool open_ = false;          // an operation has begun, and has no mark
  bool let_go_ = false;        // of the peers
  // Last: their ends wait for what they do to the rest.
  DeviceStream marks_, rescue_;
  std::array<Strand, kCudaStrands> strands_;
  std::optional<NcclCommunicator> nccl_;
};

}  // namespace farandole::cuda
