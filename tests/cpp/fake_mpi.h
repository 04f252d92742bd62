// An MPI for ranks that are threads: short messages are complete when they are sent, long ones when
// they are received, and only who calls moves anything.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
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

  std::mutex mutex;                                 // guards all
  std::map<std::tuple<int, int, int>, Pipe> pipes;  // from, to, tag
  bool broken = false;                              // every call is an error

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
};

/// One rank's functions.
class FakeMpiRank : public farandole::MpiFunctions {
 public:
  FakeMpiRank(std::shared_ptr<FakeMpi> mpi, int rank) : mpi_(std::move(mpi)), rank_(rank) {}

  farandole::MpiRequest send(std::span<const std::byte> bytes, int to,
                             int tag = farandole::kMpiFrames) override {
    const std::lock_guard lock(mpi_->mutex);
    require_whole();
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
    require_whole();
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
    require_whole();
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
    require_whole();
    auto& [posted, where] = receives_.at(request.handle);
    std::erase(mpi_->pipes[where].posted, posted);
    posted->complete = true;
  }

  void at_finalize(void (*)()) override {}

 private:
  void require_whole() const {
    if (mpi_->broken)
      throw farandole::Error(farandole::ErrorCode::link, "MPI_Anything failed with code 7");
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
};

}  // namespace testing
