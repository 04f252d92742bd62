// A libnccl.so.2 whose ranks are processes over the fake driver (fake_libcuda): they meet in memory
// that the maker of their id has, and what NCCL runs in a stream is a function of the host there.
// Its folds begin at the last rank: an order of its own. Like NCCL it waits for ever for a rank
// that is lost, until it is aborted. Settings:
//
//   FAKE_NCCL_VERSION 22005   from 23000 on NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a device
//   FAKE_NCCL_LATE    0    microseconds by which what is asked for is late; it is in progress then
//   FAKE_NCCL_HOST    ""   the name of this rank's host: on each there is one rank on a device
//   FAKE_NCCL_NOTICES 0    1: a rank that is lost is an asynchronous error of the others
//   FAKE_NCCL_FAIL    ""   "ncclAllReduce#2=3": the second such call comes to that code
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/nccl/nccl_functions.h"

namespace farandole::cuda::fake_nccl {

inline constexpr int kMostRanks = 8;
inline constexpr size_t kSlotBytes = 1 << 16, kMailBytes = 1 << 12;

/// Data from one rank to another: `written` and `read` count bytes.
struct Mail {
  std::atomic<uint64_t> written, read;
  std::byte data[kMailBytes];
};
struct Seat {
  std::atomic<uint64_t> arrived;  // meetings
  std::atomic<uint64_t> said;     // a hash of the operation
  std::atomic<int> process;
  char place[64];  // host and bus id
  std::byte slot[kSlotBytes];
  Mail to[kMostRanks];
};
/// Memory that ranks share: zeroes at first.
struct Table {
  Seat seats[kMostRanks];
};

enum class What { all_reduce, reduce_scatter, reduce, all_gather, broadcast, send, receive };

struct Task {
  What what;
  const std::byte* from;
  std::byte* to;
  size_t count;
  int type, op, peer;
  double factor;  // of op, where that scales
};

struct Communicator {
  Table* table = nullptr;
  int rank = 0, size = 0;
  ContextHandle context = nullptr;
  uint64_t met = 0;
  std::atomic<NcclCode> state{kNcclInProgress};
  std::atomic<bool> aborted{false};
  bool finalized = false, gone = false;
  std::map<int, double> ops;  // made, and not destroyed
  std::thread worker;
};

/// Thrown where an abort ends it.
struct Aborted {};

Table* table_of(const NcclUniqueId& id);
NcclUniqueId make_id();
/// Until all have come. A rank that is lost is waited for until somebody gives up.
void meet(Communicator& all);
/// Lets others have the core; looks whether it goes on at all.
void nap(Communicator& all);

/// All of a group, in its order.
void run(Communicator& all, const std::vector<Task>& tasks);
size_t width_of(int type);

void blame(const std::string& what);
int setting(const char* name, int otherwise);

}  // namespace farandole::cuda::fake_nccl

struct ncclComm : farandole::cuda::fake_nccl::Communicator {};
