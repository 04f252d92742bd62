// Sets up a group's NCCL communicator, on one host or on several. Every member sends its offer to
// the first one, which makes the id by which they find each other in NCCL. The outcome is the same
// on all of them, in the same words.
//
//   every member to the first    the first to every member
//   NcclOffer                    NcclStart: the id; or the first refusal by rank, which is the end
//   NcclOutcome                  NcclOutcome: of all; as soon as one refuses, since NCCL would keep
//                                the others waiting for it
//
// Every member sends all its messages, whatever it receives, so none is in flight when connections
// close.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/exchange.h"
#include "devices/nccl_messages.h"
#include "stream/stream.h"
#include "transport/message_link.h"

namespace farandole {

/// Never blocks. By the thread that polls.
class NcclMeeting {
 public:
  /// `connect` makes channels of its own for this. `exchange` is null where this rank has none.
  /// `wanted`: NCCL was asked for by name, so the log warns where there is none.
  NcclMeeting(const Host& host, const Membership& membership, const Connect& connect,
              std::shared_ptr<DeviceExchange> exchange, bool wanted);

  /// Whether anything has moved.
  bool poll();
  bool done() const { return members_.empty(); }
  /// Then: why the group has no communicator, the same on all members; empty: it has one.
  const std::string& refusal() const { return refusal_; }
  /// Whether kernels of all members apply factors to results; else NCCL applies them to inputs.
  bool scales_results() const { return scales_; }
  /// The members whose message is missing.
  std::vector<int> silent() const;

 private:
  enum class Phase { offering, opening, waiting, over };
  struct Member {
    std::unique_ptr<MessageLink> link;  // of the first one to each other one, and back
    std::optional<NcclOffer> offer;     // this and the next: received by the first one
    std::optional<NcclOutcome> outcome;
  };

  bool is_first() const { return membership_.rank == 0; }
  // As every member.
  NcclOffer offer() const;
  bool hear_first();
  void begin_by(const NcclStart& start);
  bool look_at_nccl();
  void say(std::string_view refusal);
  void end(std::string refusal);
  // As the first one.
  bool hear_members();
  bool answer();
  NcclStart start() const;
  std::string why_not_start() const;
  std::string first_refusal() const;
  std::string named(size_t member, std::string_view refusal) const;
  template <typename Message>
  void tell_all(const Message& message);
  bool owes_a_word(const Member& member) const;
  bool all_is_said() const;

  const Host& host_;
  const Membership& membership_;
  std::shared_ptr<DeviceExchange> exchange_;
  bool wanted_;
  std::vector<Member> members_;  // by place; none once all is said
  Phase phase_ = Phase::offering;
  bool started_ = false;  // with an id
  bool scales_ = false;
  Deadline until_;  // of NCCL
  std::string refusal_;
};

}  // namespace farandole
