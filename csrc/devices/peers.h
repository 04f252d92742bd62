// Exchanges the offers that the ranks of one host make each other for their devices. Messages and
// descriptors travel over sockets, and all ranks learn in the same words whether everybody could
// use them.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "cuda/work.h"
#include "devices/parting.h"
#include "stream/stream.h"

namespace farandole {

/// This rank's offer to the others, maybe with a descriptor; or why it has none.
struct PeerOffer {
  std::array<std::byte, 192> data{};
  Fd descriptor;
  std::string refusal;

  template <typename T>
  void put(const T& value) {
    static_assert(sizeof value <= sizeof data);
    std::memcpy(data.data(), &value, sizeof value);
  }
};

/// A member's offer. The descriptor stays the meeting's.
struct PeerOffered {
  std::array<std::byte, 192> data{};
  int descriptor = -1;

  template <typename T>
  T get() const {
    T value;
    std::memcpy(&value, data.data(), sizeof value);
    return value;
  }
};

/// Never blocks. By the thread that polls.
class PeerMeeting {
 public:
  /// Uses the offers of all members, by place, with this rank's own. Throws Error where it cannot.
  using Use = std::function<void(std::span<const PeerOffered>)>;
  /// Once all members have used them: looks whether it works, until there is an answer, of bits
  /// that all are to hear of. Throws Error where it does not.
  using Check = std::function<std::optional<uint32_t>()>;

  PeerMeeting(const Host& host, const Membership& membership, uint64_t key, PeerOffer mine, Use use,
              Check check);

  /// Whether anything has moved.
  bool poll();
  bool done() const { return round_ == checked_ && said(checked_) && told(checked_); }
  /// Then: the first refusal by rank, the same on all members; empty: all could use what they got.
  const std::string& refusal() const { return refusal_; }
  /// Then: the bits of all members' checks.
  uint32_t notes() const { return notes_; }
  /// Then, or where the meeting does not come to its end: the parting.
  PeerParting parting();
  /// The members whose message is missing.
  std::vector<int> silent() const;

 private:
  enum Round : int32_t { offers_, used_, checked_, rounds_ };
  struct Letter {
    uint64_t key;
    int32_t from, round;
    uint32_t notes;
    std::array<std::byte, 192> data;
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
  void use_all();
  bool check_all();
  bool somebody_refuses(int round) const;
  void conclude();
  bool said(int round) const;  // by all others
  bool told(int round) const;  // to all others
  Letter letter(int round) const;
  std::string address_of(int r) const;

  const Membership& membership_;
  uint64_t key_;
  PeerOffer mine_;
  Use use_;
  Check check_;
  Fd listener_;
  std::vector<Peer> peers_;    // by place, this rank's unused
  std::vector<Fd> strangers_;  // connected, and nothing received yet
  int round_ = 0;
  std::string refusal_;
  uint32_t notes_ = 0;
};

}  // namespace farandole
