// How ranks of one host come by each other's buckets: descriptors travel over sockets, and all
// learn in the same words whether everybody has mapped everything.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/cuda_table.h"
#include "base/fd.h"
#include "stream/stream.h"

namespace farandole {

/// What this rank gives the others: a bucket, or why it has none.
struct OwnBucket {
  CudaShare share{};
  Fd descriptor;
  std::string refusal;
};

/// Never blocks. By the thread that polls.
class PeerMeeting {
 public:
  /// Maps the bucket of a member, by its place; throws Error where it cannot.
  using Map = std::function<void(int member, const CudaShare&, const Fd& descriptor)>;

  PeerMeeting(const Host& host, const Membership& membership, uint64_t key, OwnBucket mine,
              Map map);

  /// Whether anything has moved.
  bool poll();
  bool done() const { return said(mapped_) && told(mapped_); }
  /// Then: the first refusal by rank, the same on all members; empty: all have mapped all.
  const std::string& refusal() const { return refusal_; }
  /// The members whose word is missing.
  std::vector<int> silent() const;

 private:
  enum Round : int32_t { offers_, mapped_, rounds_ };
  struct Letter {
    uint64_t key;
    int32_t from, round;
    CudaShare share;
    char refusal[256];
  };
  struct Peer {
    Fd to, from;  // sockets
    int sent = 0;
    std::optional<Letter> heard[rounds_];
    Fd descriptor;
  };

  void listen();
  bool send_to(int r);
  bool take_in();
  bool hear(Fd& socket, Peer*& peer);
  void map_all();
  void conclude();
  bool said(int round) const;  // by all others
  bool told(int round) const;  // to all others
  Letter letter(int round) const;
  std::string address_of(int r) const;

  const Membership& membership_;
  uint64_t key_;
  OwnBucket mine_;
  Map map_;
  Fd listener_;
  std::vector<Peer> peers_;    // by place, this rank's unused
  std::vector<Fd> strangers_;  // connected, and nothing heard yet
  int round_ = 0;
  std::string refusal_;
};

}  // namespace farandole
