// The agreement of ranks that share no memory: they tell each other, in rounds.
//
// In round k each member tells the one 2^k places after it which operation the members before it
// have started, as far as it knows. It receives the same from 2^k places before. After ceil(log2 P)
// rounds every member knows all (dissemination: Hensgen, Finkel and Manber 1988). Small data go
// along. If members differ, they send each other full descriptions in the same way (an all-gather:
// Bruck et al. 1997).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "control/progress_board.h"
#include "stream/agreement.h"
#include "transport/message_link.h"

namespace farandole {

class MessageAgreement : public StreamAgreement {
 public:
  /// `connect` makes channels of their own for this stream's agreement. All outlive it.
  MessageAgreement(const StreamMemory& memory, Connect connect, uint64_t key,
                   uint32_t first_sequence, ProgressBoard& board);
  ~MessageAgreement() override;

  bool open() override { return true; }
  void post(uint64_t ticket, std::span<const std::byte> data) override;
  Posts compare() override;
  std::span<const std::span<const std::byte>> data() const override { return by_member_; }
  void describe(const Descriptor& mine, std::span<const BundledArray> arrays) override;
  std::optional<std::vector<Shown>> described() override;
  bool settled() override { return send_all(); }
  bool others_may_settle_first() const override { return true; }
  void complete(uint32_t sequence) override;

  bool has_opened(int r) const override { return told(r).has_value(); }
  std::optional<uint32_t> begun(int r) const override;
  std::optional<uint32_t> completed(int r) const override;
  bool knows_all_of(int r) const override;
  bool has_closed(int r) const override;
  std::vector<int> silent() const override;
  bool is_inside(int) const override { return false; }  // they map nothing of each other

  void show_holdups(std::span<const int> ranks, TimePoint when) override;
  std::vector<int> holdups_of(int r) const override;
  std::optional<ClosedPage> leave_behind() const override { return std::nullopt; }

 private:
  int size() const { return memory_.size(); }
  int after() const { return (memory_.rank + (1 << round_)) % size(); }
  int before() const { return (memory_.rank + size() - (1 << round_)) % size(); }
  bool is_last_round() const { return (1 << round_) >= size(); }
  MessageLink& link_to(int member);
  void poll(int member, MessageLink& link);
  void tell();
  void tell_in_full();
  bool hear(std::vector<std::byte>& message);
  void take(std::vector<std::byte> message);
  void take_descriptions(std::span<const std::byte> message);
  size_t count_to_tell(size_t known) const;
  void sort_by_member();
  bool send_all();
  std::optional<StreamProgress> told(int r) const;
  int world_rank(int r) const { return memory_.members[static_cast<size_t>(r)]; }

  const StreamMemory& memory_;
  Connect connect_;
  uint64_t key_;
  ProgressBoard& board_;
  std::map<int, MessageLink> links_;  // by member
  uint64_t ticket_ = 0;
  int round_ = 0;
  bool differs_ = false;
  std::vector<std::span<const std::byte>> data_;  // of this member, the one before it, …
  std::vector<std::vector<std::byte>> heard_;     // the messages where they lie
  std::vector<std::span<const std::byte>> by_member_;
  std::vector<Shown> known_;  // while ranks disagree: of this member, the one before it, …
  StreamProgress mine_;
  TimePoint next_question_{};
};

}  // namespace farandole
