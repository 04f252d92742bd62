// An MPI for ranks that are threads: short messages are complete when they are sent, long ones when
// they are received, all-reduces when all ranks have begun them, and only who calls moves anything.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "fold/fold.h"
#include "transport/mpi_functions.h"

namespace testing {

class FakeMpi {
 public:
  static constexpr size_t kEager = 8 * 1024;

  struct Message {
    std::vector<std::byte> copy;
    std::span<const std::byte> bytes;
    bool complete = false;
  };
  struct Posted {
    std::span<std::byte> into;
    size_t count = 0;
    bool complete = false;
  };
  struct Pipe {
    std::deque<std::shared_ptr<Message>> sent;
    std::deque<std::shared_ptr<Posted>> posted;
  };

  /// One all-reduce, as far as ranks have begun it.
  struct Reduction {
    struct Share {
      const std::byte* input;
      std::byte* output;
    };
    std::map<int, Share> shares;  // by rank
    size_t count = 0;
    farandole::DType dtype{};
    farandole::ReduceOp op{};
    bool complete = false;
  };
  static constexpr uint64_t kFirstDuplicate = 1000;

  explicit FakeMpi(int ranks = 2) : size(ranks), duplicates(static_cast<size_t>(ranks)) {}

  const int size;
  std::mutex mutex;                                 // guards all
  std::map<std::tuple<int, int, int>, Pipe> pipes;  // from, to, tag
  std::vector<uint64_t> duplicates;                 // by rank: how many it has begun to make
  std::map<std::pair<uint64_t, size_t>, std::shared_ptr<Reduction>> reductions;  // in their order
  std::map<std::pair<int, uint64_t>, size_t> begun;  // by rank and communicator
  bool mixed = false;                                // ranks have begun different ones
  bool broken = false;                               // every call is an error
  std::string fails;                                 // every call of that name is

  void match(Pipe& pipe) {
    while (!pipe.sent.empty() && !pipe.posted.empty()) {
      Message& message = *pipe.sent.front();
      Posted& posted = *pipe.posted.front();
      posted.count = std::min(message.bytes.size(), posted.into.size());
      std::ranges::copy(message.bytes.first(posted.count), posted.into.begin());
      message.complete = posted.complete = true;
      pipe.sent.pop_front();
      pipe.posted.pop_front();
    }
  }

  /// In an order of its own.
  void fold(Reduction& reduction) const {
    if (std::cmp_less(reduction.shares.size(), size)) return;
    reduction.complete = true;
    if (mixed) return;  // their lengths may differ
    std::vector<const std::byte*> inputs;
    for (const auto& [rank, share] : reduction.shares) inputs.insert(inputs.begin(), share.input);
    std::vector<std::byte> total(reduction.count * farandole::size_of(reduction.dtype));
    farandole::fold_canonical(total.data(), inputs, reduction.count, reduction.dtype, reduction.op,
                              {});
    for (const auto& [rank, share] : reduction.shares) std::ranges::copy(total, share.output);
  }
};

/// One rank's functions.
class FakeMpiRank : public farandole::MpiFunctions {
 public:
  FakeMpiRank(std::shared_ptr<FakeMpi> mpi, int rank) : mpi_(std::move(mpi)), rank_(rank) {}

  farandole::MpiRequest send(std::span<const std::byte> bytes, int to,
                             int tag = farandole::kMpiFrames) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole("MPI_Isend");
    auto message = std::make_shared<FakeMpi::Message>();
    message->bytes = bytes;
    if (bytes.size() <= FakeMpi::kEager) {
      message->copy.assign(bytes.begin(), bytes.end());
      message->bytes = message->copy;
      message->complete = true;
    }
    FakeMpi::Pipe& pipe = mpi_->pipes[{rank_, to, tag}];
    pipe.sent.push_back(message);
    sends_[++next_] = std::move(message);
    mpi_->match(pipe);
    return {next_};
  }

  farandole::MpiRequest receive(std::span<std::byte> into, int from,
                                int tag = farandole::kMpiFrames) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole("MPI_Irecv");
    auto posted = std::make_shared<FakeMpi::Posted>();
    posted->into = into;
    FakeMpi::Pipe& pipe = mpi_->pipes[{from, rank_, tag}];
    pipe.posted.push_back(posted);
    receives_[++next_] = {std::move(posted), {from, rank_, tag}};
    mpi_->match(pipe);
    return {next_};
  }

  bool test(farandole::MpiRequest& request, size_t* bytes) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole("MPI_Test");
    if (const auto joint = joint_.find(request.handle); joint != joint_.end()) {
      if (!joint->second()) return false;
      joint_.erase(joint);
      return true;
    }
    if (const auto sent = sends_.find(request.handle); sent != sends_.end()) {
      if (!sent->second->complete) return false;
      sends_.erase(sent);
      return true;
    }
    const auto received = receives_.find(request.handle);
    if (!received->second.posted->complete) return false;
    if (bytes != nullptr) *bytes = received->second.posted->count;
    receives_.erase(received);
    return true;
  }

  void cancel(farandole::MpiRequest& request) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole("MPI_Cancel");
    auto& [posted, where] = receives_.at(request.handle);
    std::erase(mpi_->pipes[where].posted, posted);
    posted->complete = true;
  }

  bool folds(farandole::DType dtype, farandole::ReduceOp) const override {
    return dtype != farandole::DType::int8;  // it lacks that one
  }

  farandole::MpiRequest duplicate(uint64_t& made) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole("MPI_Comm_idup");
    const uint64_t number = mpi_->duplicates[static_cast<size_t>(rank_)]++;
    joint_[++next_] = [mpi = mpi_, number, &made] {
      made = FakeMpi::kFirstDuplicate + number;
      return std::ranges::all_of(mpi->duplicates,
                                 [&](uint64_t made_by) { return made_by > number; });
    };
    return {next_};
  }

  void adopt(uint64_t&) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole("MPI_Comm_set_errhandler");
  }

  farandole::MpiRequest all_reduce(const std::byte* input, std::byte* output, size_t count,
                                   farandole::DType dtype, farandole::ReduceOp op,
                                   uint64_t communicator) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole("MPI_Iallreduce");
    const size_t number = mpi_->begun[{rank_, communicator}]++;
    std::shared_ptr<FakeMpi::Reduction>& reduction = mpi_->reductions[{communicator, number}];
    if (!reduction) {
      reduction = std::make_shared<FakeMpi::Reduction>();
      reduction->count = count;
      reduction->dtype = dtype;
      reduction->op = op;
    }
    mpi_->mixed |= reduction->count != count || reduction->dtype != dtype || reduction->op != op;
    reduction->shares[rank_] = {input, output};
    mpi_->fold(*reduction);
    joint_[++next_] = [reduction] { return reduction->complete; };
    return {next_};
  }

  void at_finalize(void (*)()) override {}

 private:
  void require_whole(const std::string& function) const {
    if (mpi_->broken || mpi_->fails == function)
      throw farandole::Error(farandole::ErrorCode::link, function + " failed with code 7");
  }

  std::shared_ptr<FakeMpi> mpi_;
  int rank_;
  uint64_t next_ = 0;
  std::map<uint64_t, std::shared_ptr<FakeMpi::Message>> sends_;
  struct Received {
    std::shared_ptr<FakeMpi::Posted> posted;
    std::tuple<int, int, int> where;
  };
  std::map<uint64_t, Received> receives_;
  std::map<uint64_t, std::function<bool()>> joint_;  // requests that others have a part in
};

}  // namespace testing
