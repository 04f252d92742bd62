// The table of C functions that the library for CUDA (_cuda.so) hands out when it is loaded, and
// nothing else: no symbol looked up in another library of ours, no C++ type across the border. The
// other way round from base/plugin.h, where the engine hands out the table.
#pragma once

#include <cstdint>

#include "base/update_factors.h"

namespace farandole {

extern "C" {

/// Texts end with zero, cut where they are longer.
struct CudaFailure {
  int32_t kind;  // 1 + an ErrorCode
  char verdict[512];
  char evidence[1024];
  char advice[512];
};

/// Properties of a device.
struct CudaDevice {
  int32_t capability;  // 90: 9.0
  int32_t multiprocessors;
  uint64_t memory_bytes;
  int32_t instance;     // of a device in MIG mode
  int32_t descriptors;  // its memory can be exported as a file descriptor
  int32_t multicast;    // a switch joins it to others, and folds for NCCL (NVLink SHARP)
  char name[256];
  char uuid[64];
  char bus_id[32];
  char unfit[512];  // why our kernels do not run on it; empty where they do
};

/// A device's copies: two streams of ours, one to the host and one from it. Any thread.
struct CudaQueue;
/// Pages of the host that a device reads and writes.
struct CudaPages;
/// Memory of a device, zero at first.
struct CudaMemory;

enum CudaWay : int32_t { kToHost = 0, kToDevice = 1 };

/// One rank's end of an exchange between devices: streams of its own; on one host a bucket that all
/// its ranks map, with the flags by which they meet; a communicator of NCCL's. Either may be
/// missing. By one thread at a time, but for what says otherwise.
struct CudaExchange;
/// Events of one operation: its arrays are ready, and it is complete. Any thread.
struct CudaMoments;
/// The same by the host's monotonic clock, in nanoseconds: when arrays were ready, when the device
/// began, and when it was done.
struct CudaTimes {
  int64_t ready, begun, complete;
};

/// The data with which another rank maps a bucket. A file descriptor is sent with it, or it has a
/// handle; then the bucket's owner must be the last to release it.
struct CudaShare {
  uint64_t process, number, bytes;
  char device[16];
  int32_t multiprocessors;
  int32_t by_handle;
  int32_t takes_turns;  // with other processes on the device
  int32_t multicast;    // as CudaDevice's
  char handle[64];
};

struct CudaLinks {
  int32_t proved;
  int32_t words;  // those that streams write have come, too
};

struct CudaExchangeShape {
  int32_t device, rank, size;
  int32_t doorbell;       // an event descriptor, as open_queue's
  int32_t spins;          // there is to be room for what spin() and run_lanes() need
  int32_t captured;       // all its operations become parts of graphs: begin_captured()
  uint64_t link_blocks;   // the most of a fold over links; 0: as many as those need
  uint64_t bucket_bytes;  // the most of one piece: the bucket has room for kCudaStrands pieces, or
                          // for one where it is captured
};
/// Pieces that can be under way at once.
inline constexpr int32_t kCudaStrands = 2;

/// A copy from the input to this rank's bucket, or from `rank`'s bucket to the output. Offsets.
struct CudaMove {
  uint64_t from, to, bytes;
  int32_t rank;
};

/// Where the result of a fold goes. A number from 0 on is a rank, to whose bucket it goes, at the
/// same offset.
enum CudaFoldsTo : int32_t { kFoldsToOutput = -2, kFoldsToAllBuckets = -1 };

/// The update of one stretch of a parameter once its gradients are folded. They stand at `gradient`
/// in this rank's bucket; the new values replace them there, and go to the others' buckets.
struct CudaUpdate {
  uint64_t value, gradient, count;  // an address, an offset, elements
  uint64_t state[kMostSlots];       // addresses
  UpdateKind kind;
  UpdateFactors factors;
};

/// A stretch of one parameter whose gradients were folded to this rank's bucket, for a norm.
struct CudaNormStretch {
  uint64_t gradient, count;  // an offset, elements
  uint64_t begin;            // elements of its first tile that are before it
  uint64_t first_term;
};

/// A part of a collective: move in, meet, fold, move out, and meet again, before the last move
/// where that needs what others have folded.
struct CudaPiece {
  int32_t strand;
  uint64_t input, output;  // addresses
  const CudaMove* in;
  const CudaMove* out;
  uint64_t ins, outs;
  // The fold of elements [first, first + count) of all buckets; of none where count is 0.
  uint64_t first, count;
  int32_t dtype, op, folds_to;
  uint64_t fold_to;  // an address in the output
  // Where this rank's part of what is folded lies instead of in its bucket; 0: there.
  uint64_t own_from, own_to;
  double leaf_factor, finish_factor;
  int64_t leaf_divide, finish_divide;
  const CudaUpdate* updates;  // of what was folded to this rank's own bucket
  uint64_t update_count;
  const CudaNormStretch* norms;  // likewise, in place of updates
  uint64_t norm_count;
  uint64_t norm_terms;   // the address of all terms, of doubles: one for each tile of a stretch
  uint64_t norm_tile;    // elements
  int32_t norm_largest;  // magnitudes, in place of sums of squares
};

/// The limits of run_lanes(), the same on all ranks once all peers are mapped. With no lanes it
/// cannot be used.
struct CudaLaneRoom {
  int32_t lanes;         // at most
  uint64_t piece_bytes;  // of a collective on the whole, at most; half of it of all shares
};
inline constexpr int kCudaMostLanes = 32, kCudaMostSegments = 8;
/// A schedule: of the planner of this name (schedule/planners.h), for a shape of this rank's.
struct CudaLanes {
  char planner[32];
  int32_t collective, root, lanes, segments;
  uint64_t count;
  const uint64_t* counts;
  uint64_t counts_size;
};

/// The state of collectives in graphs, which are named by the numbers given to begin_captured().
struct CudaGraphState {
  uint32_t begun, ended;  // replays of any of them, modulo 2^32
  uint32_t at;            // which has begun last
  int32_t overlaps;       // 1: it began before another had ended
  int32_t differs;        // a rank that was at another one when this rank was at `own`; -1: none
  uint32_t own, theirs;
};

/// Ranks by their bits: which have not come to where others have, or none of them; none where all
/// have come to all that is under way.
struct CudaLate {
  int32_t known;  // 0: the device has yet to say
  uint64_t ranks;
};

/// The NCCL library that was found.
struct CudaNcclLibrary {
  int32_t version;  // 22005: 2.20.5
  char file[512];   // its path
};

/// The id by which ranks find each other in NCCL: one rank makes it, all receive it.
struct CudaNcclId {
  char bytes[128];
};

enum CudaNcclWhat : int32_t {
  kNcclAllReduce,
  kNcclReduceScatter,
  kNcclReduce,
  kNcclAllGather,
  kNcclBroadcast,
  kNcclSend,
  kNcclReceive,
};
/// One of NCCL's operations; addresses, and a count as NCCL has it. `peer`: the root, or the other
/// end of a message.
struct CudaNcclCall {
  int32_t what, peer;
  uint64_t input, output, count;
};
/// NCCL operations that run as one.
struct CudaNcclJob {
  const CudaNcclCall* calls;
  uint64_t size;
  int32_t dtype, op;  // ours
  double factor;      // of every input, for sums of floating-point numbers; 1: none
  double finish;      // of every result, likewise, where load_scales() has succeeded
};

/// Each function may open and initialize the driver. A result of 0: it failed.
struct CudaTable {
  uint32_t version;
  uint32_t bytes;
  int32_t nvcc;  // or NVRTC that compiled the kernels: 12090: of CUDA 12.9; 0: built without
  int32_t (*driver_version)(CudaFailure* failure);  // 12040: CUDA 12.4
  int32_t (*device_count)(CudaFailure* failure);
  int32_t (*device)(int32_t ordinal, CudaDevice* device, CudaFailure* failure);
  /// Before NCCL is first needed. `setting`: FARANDOLE_NCCL; `wheel`: where PyPI's package has the
  /// library, or empty.
  void (*look_for_nccl_in)(const char* setting, const char* wheel);
  /// Opens the library.
  int32_t (*find_nccl)(CudaNcclLibrary* found, CudaFailure* failure);

  /// Finds the device that has this address.
  int32_t (*device_of)(uint64_t address, int32_t* ordinal, CudaFailure* failure);
  /// `doorbell`: an event descriptor, open until the queue is closed, that is rung when copies to
  /// the host come to a mark.
  CudaQueue* (*open_queue)(int32_t ordinal, int32_t doorbell, CudaFailure* failure);
  /// Waits for its copies.
  void (*close_queue)(CudaQueue* queue);
  /// The stream of copies to the host (a CUstream), so that it can be made to wait for an array.
  uint64_t (*stream_to_host)(const CudaQueue* queue);
  /// Whole pages, which stay mapped for as long. Queues of several devices may have the same ones.
  CudaPages* (*register_pages)(CudaQueue* queue, void* pages, uint64_t bytes, CudaFailure* failure);
  void (*release_pages)(CudaPages* pages);
  CudaMemory* (*allocate)(CudaQueue* queue, uint64_t bytes, uint64_t* address,
                          CudaFailure* failure);
  /// When nothing uses it any more.
  void (*release)(CudaMemory* memory);
  /// `offset`: bytes from the begin of the pages.
  int32_t (*copy_to_host)(CudaQueue* queue, CudaPages* to, uint64_t offset, uint64_t from,
                          uint64_t bytes, CudaFailure* failure);
  int32_t (*copy_to_device)(CudaQueue* queue, uint64_t to, CudaPages* from, uint64_t offset,
                            uint64_t bytes, CudaFailure* failure);
  /// A number that is reached when all that now is in this way's stream is done.
  int32_t (*mark)(CudaQueue* queue, CudaWay way, uint32_t* number, CudaFailure* failure);
  /// 1: it is. Asks the driver nothing.
  int32_t (*reached)(const CudaQueue* queue, CudaWay way, uint32_t number);
  /// Fails where the context is lost, and no mark will be reached any more.
  int32_t (*look_for_loss)(CudaQueue* queue, CudaFailure* failure);
  /// Later copies to the host wait for the work that is in `stream` (a CUstream) now.
  int32_t (*follow)(CudaQueue* queue, uint64_t stream, CudaFailure* failure);
  /// Later work in `stream` waits for the copies to the device up to now.
  int32_t (*precede)(CudaQueue* queue, uint64_t stream, CudaFailure* failure);
  /// `captured`: whether work put into `stream` (a CUstream) becomes part of a graph.
  int32_t (*is_captured)(const CudaQueue* queue, uint64_t stream, int32_t* captured,
                         CudaFailure* failure);
  /// The host waits for all copies of this way.
  int32_t (*synchronize)(CudaQueue* queue, CudaWay way, CudaFailure* failure);

  // ---- exchanges ----

  /// Streams alone.
  CudaExchange* (*open_exchange)(const CudaExchangeShape* shape, CudaFailure* failure);
  /// Once. `descriptor` is the caller's, for the others, or -1. Fails where there is a kernel or a
  /// function of the driver too few.
  int32_t (*open_bucket)(CudaExchange* exchange, CudaShare* mine, int32_t* descriptor,
                         CudaFailure* failure);
  /// Another rank's bucket; `descriptor` stays the caller's. 2: the driver lets no stream write
  /// there, and a kernel does.
  int32_t (*map_peer)(CudaExchange* exchange, int32_t rank, const CudaShare* theirs,
                      int32_t descriptor, CudaFailure* failure);
  /// Once all peers are mapped: writes to the buckets of all, and reads from them. Fails where it
  /// reads something else than their owners wrote.
  int32_t (*prove_links)(CudaExchange* exchange, CudaFailure* failure);
  /// Once all ranks have: whether what they wrote has come, to be called again until it has. Fails
  /// where something does not within two seconds; then arrays take another way.
  int32_t (*look_at_links)(CudaExchange* exchange, CudaLinks* links, CudaFailure* failure);
  /// Words that streams write do not come to some rank: kernels are to write them.
  void (*write_by_kernels)(CudaExchange* exchange);
  /// This rank uses nothing of other ranks' any more: drains, if need be, and maps no bucket but
  /// its own. Nothing begins afterwards.
  void (*let_go_of_peers)(CudaExchange* exchange);
  /// Drains, if need be, and ends; where it is in graphs (begin_captured), once those are gone.
  void (*close_exchange)(CudaExchange* exchange);

  /// Ready when all that now is in these streams (CUstream) is done. Any thread. `timed`: it can be
  /// told when; about once a second that waits for some microseconds.
  CudaMoments* (*open_moments)(CudaExchange* exchange, const uint64_t* streams, uint64_t count,
                               int32_t timed, CudaFailure* failure);
  void (*close_moments)(CudaExchange* exchange, CudaMoments* moments);
  /// begin, run or run_lanes for each piece, or spin or run_nccl once, end: nothing waits for the
  /// device. Operations of an exchange come one after the other. `strands`: those that its pieces
  /// name are fewer.
  int32_t (*begin)(CudaExchange* exchange, CudaMoments* moments, uint64_t strands,
                   CudaFailure* failure);
  int32_t (*run)(CudaExchange* exchange, const CudaPiece* piece, CudaFailure* failure);
  /// Bytes that spin() takes, the same on all ranks, once all peers are mapped; 0: it cannot be
  /// used. `granted`: kernels of ranks that share a device may count on running at once.
  uint64_t (*spin_bytes)(const CudaExchange* exchange, int32_t granted);
  /// In place of run(): all of a small all-reduce by one kernel, which waits for those of the other
  /// ranks. Without moves it folds `count` elements from input to output; else in this rank's
  /// bucket, between the moves.
  int32_t (*spin)(CudaExchange* exchange, const CudaPiece* piece, int32_t granted,
                  CudaFailure* failure);
  /// `granted`: as of spin_bytes().
  void (*lane_room)(const CudaExchange* exchange, int32_t granted, CudaLaneRoom* room);
  /// In place of run(): a collective by one kernel that interprets a schedule, and waits for those
  /// of the other ranks. With moves from and to this rank's bucket it runs there, else from input
  /// to output. Of the piece moves, dtype, operation and scales count.
  int32_t (*run_lanes)(CudaExchange* exchange, const CudaLanes* lanes, const CudaPiece* piece,
                       int32_t granted, CudaFailure* failure);
  /// `number`: reached when all of it is done.
  int32_t (*end)(CudaExchange* exchange, CudaMoments* moments, uint32_t* number,
                 CudaFailure* failure);
  /// Once all peers are mapped, the same on all ranks: whether some of them are processes that take
  /// turns on a device, by slices of milliseconds.
  int32_t (*take_turns)(const CudaExchange* exchange);
  /// Whether another piece, or another operation, does not fill a stream: the driver would block
  /// the calling thread until all ranks' devices have gone on. Asks the driver nothing.
  int32_t (*has_room)(const CudaExchange* exchange);
  /// Asks the driver nothing. Any thread.
  int32_t (*is_complete)(const CudaExchange* exchange, uint32_t number);
  /// For timed moments, once the operation is complete.
  int32_t (*times_of)(const CudaMoments* moments, CudaTimes* times, CudaFailure* failure);
  /// Rings the doorbell of the exchange's shape when an operation is complete. Called after end().
  int32_t (*ring_after)(CudaExchange* exchange, const CudaMoments* moments, CudaFailure* failure);
  /// Later work in `stream` (a CUstream) waits for the operation. Any thread.
  int32_t (*complete_before)(CudaExchange* exchange, const CudaMoments* moments, uint64_t stream,
                             CudaFailure* failure);
  /// Fails where the context is lost, and nothing will be complete any more.
  int32_t (*look_for_lost_exchange)(CudaExchange* exchange, CudaFailure* failure);
  /// Finds the ranks whose devices keep this rank's waiting: to be called again, every few
  /// milliseconds. Not for NCCL's operations, nor for graphs.
  int32_t (*look_for_late)(CudaExchange* exchange, CudaLate* late, CudaFailure* failure);
  /// The ranks have failed: nothing waits for others any more, and what is in flight ends, with
  /// results that mean nothing. A rank that is late may undo it: again, until all is complete.
  int32_t (*drain)(CudaExchange* exchange, CudaFailure* failure);

  // ---- in place of begin and end, where the exchange's shape says `captured` ----

  /// Pieces given to run() until end_captured() become part of the graph that `stream` (a CUstream)
  /// is being captured into. `number`: the same on all ranks, and of no other one. Graphs use the
  /// exchange as long as they exist; no two run at once.
  int32_t (*begin_captured)(CudaExchange* exchange, uint64_t stream, uint32_t number,
                            CudaFailure* failure);
  int32_t (*end_captured)(CudaExchange* exchange, CudaFailure* failure);
  /// These two ask the driver nothing. Any thread. is_complete() says whether so many replays have
  /// ended.
  void (*graph_state)(const CudaExchange* exchange, CudaGraphState* state);
  /// 1: the state says that graphs overlap, or differ between ranks.
  int32_t (*graphs_are_wrong)(const CudaExchange* exchange);
  /// Graphs that are launched from now on wait for nobody; their results mean nothing. Takes some
  /// milliseconds.
  void (*give_up_graphs)(CudaExchange* exchange);

  // ---- NCCL's communicator of an exchange ----

  int32_t (*make_nccl_id)(CudaNcclId* id, CudaFailure* failure);
  /// Begins to make it, once; nccl_ready() says when it is there. All ranks of the exchange's shape
  /// take part.
  int32_t (*open_nccl)(CudaExchange* exchange, const CudaNcclId* id, CudaFailure* failure);
  /// `ready`: whether what was asked of NCCL last is done: only then may it be asked again, and
  /// what was run is in the stream. Fails with what NCCL came to.
  int32_t (*nccl_ready)(CudaExchange* exchange, int32_t* ready, CudaFailure* failure);
  /// Once: the kernels that apply `finish` of an operation. Fails where there are none.
  int32_t (*load_scales)(CudaExchange* exchange, CudaFailure* failure);
  /// Behind what is in the exchange's stream.
  int32_t (*run_nccl)(CudaExchange* exchange, const CudaNcclJob* job, CudaFailure* failure);
  /// Fails, once, where NCCL has failed at what is in flight.
  int32_t (*look_for_nccl_failure)(CudaExchange* exchange, CudaFailure* failure);
  /// Ends it, and what it has in flight, whatever others do; as often as one likes.
  void (*abort_nccl)(CudaExchange* exchange);
};

}  // extern "C"

inline constexpr uint32_t kCudaTableVersion = 18;

}  // namespace farandole
