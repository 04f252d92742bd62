#include "stream/message_agreement.h"

#include <algorithm>
#include <string>
#include <utility>

#include "stream/agreement_messages.h"

namespace farandole {
namespace {

constexpr auto kBetweenQuestions = std::chrono::milliseconds(100);
constexpr size_t kSealedToo = 1024;  // bytes of data, whose seal costs next to nothing

}  // namespace

MessageAgreement::MessageAgreement(const StreamMemory& memory, Connect connect, uint64_t key,
                                   uint32_t first_sequence, ProgressBoard& board)
    : memory_(memory),
      connect_(std::move(connect)),
      key_(key),
      board_(board),
      mine_{first_sequence, first_sequence, {}} {
  board_.show(key_, mine_);
}

MessageAgreement::~MessageAgreement() { board_.forget(key_); }

// ---- messages ----

MessageLink& MessageAgreement::link_to(int member) {
  auto found = links_.find(member);
  if (found == links_.end()) found = links_.try_emplace(member, connect_(member, 1)).first;
  return found->second;
}

void MessageAgreement::poll(int member, MessageLink& link) {
  taken("the length of a message", world_rank(member), world_rank(memory_.rank),
        [&] { link.poll(); });
}

/// The next message of this round's member, if it has come.
bool MessageAgreement::hear(std::vector<std::byte>& message) {
  for (auto& [member, link] : links_)
    if (!link.sent()) poll(member, link);
  MessageLink& link = link_to(before());
  if (link.receive(message)) return true;
  poll(before(), link);
  return link.receive(message);
}

bool MessageAgreement::send_all() {
  bool sent = true;
  for (auto& [member, link] : links_) {
    if (!link.sent()) poll(member, link);
    sent &= link.sent();
  }
  return sent;
}

// ---- the life of an operation ----

void MessageAgreement::post(uint64_t ticket, std::span<const std::byte> data) {
  ticket_ = ticket;
  round_ = 0;
  differs_ = false;
  data_ = {data};
  heard_.clear();
  mine_.begun = static_cast<uint32_t>(ticket >> 32);
  board_.show(key_, mine_);
  tell();
}

void MessageAgreement::tell() {
  const auto told = std::span(data_).first(count_to_tell(data_.size()));
  size_t bytes = 0;
  for (const auto data : told) bytes += data.size();
  FrameWriter message(bytes);
  put_as<StartedMessage>(message, ticket_, differs_);
  for (const auto data : told) message.put(static_cast<uint32_t>(data.size()));
  const size_t head = message.size() - sizeof(uint32_t);
  for (const auto data : told) message.put_bytes(data);
  link_to(after()).send_frame(message.take_frame(), bytes <= kSealedToo ? head + bytes : head);
}

/// How many members' data to tell: no more than the receiver lacks.
size_t MessageAgreement::count_to_tell(size_t known) const {
  return std::min(known, static_cast<size_t>(size() - (1 << round_)));
}

void MessageAgreement::take(std::vector<std::byte> message) {
  WireReader from(message);
  const auto theirs = get_message<StartedMessage>(from);
  if (theirs.ticket >> 32 != ticket_ >> 32)
    WireReader::malformed("operation " + std::to_string(theirs.ticket >> 32) + " where " +
                          std::to_string(ticket_ >> 32) + " comes");
  differs_ |= theirs.differs || theirs.ticket != ticket_;
  std::vector<uint32_t> sizes(count_to_tell(data_.size()));
  for (uint32_t& bytes : sizes) {
    bytes = from.get<uint32_t>();
    if (bytes > kMostEagerBytes) WireReader::malformed(std::to_string(bytes) + " bytes of data");
  }
  for (const uint32_t bytes : sizes) data_.push_back(from.get_bytes(bytes));
  from.end();
  heard_.push_back(std::move(message));  // its bytes stay where they are
}

void MessageAgreement::sort_by_member() {
  by_member_.resize(data_.size());
  for (int i = 0; i < size(); ++i)
    by_member_[static_cast<size_t>((memory_.rank + size() - i) % size())] =
        data_[static_cast<size_t>(i)];
}

Posts MessageAgreement::compare() {
  std::vector<std::byte> message;
  while (!is_last_round()) {
    if (!hear(message)) return Posts::waiting;
    taken("the start of an operation", world_rank(before()), world_rank(memory_.rank),
          [&] { take(std::move(message)); });
    ++round_;
    if (!is_last_round()) tell();
  }
  if (!send_all()) return Posts::waiting;
  if (differs_) return Posts::different;
  sort_by_member();
  return Posts::same;
}

void MessageAgreement::describe(const Descriptor& mine, std::span<const BundledArray> arrays) {
  known_ = {{mine, {arrays.begin(), arrays.end()}}};
  round_ = 0;
  tell_in_full();
}

void MessageAgreement::tell_in_full() {
  WireWriter message;
  const size_t count = count_to_tell(known_.size());
  message.put(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) put_message(message, known_[i]);
  link_to(after()).send(message.take());
}

void MessageAgreement::take_descriptions(std::span<const std::byte> message) {
  WireReader from(message);
  const auto count = from.get<uint32_t>();
  if (count != count_to_tell(known_.size()))
    WireReader::malformed(std::to_string(count) + " descriptions where " +
                          std::to_string(count_to_tell(known_.size())) + " belong");
  for (uint32_t i = 0; i < count; ++i) {
    known_.push_back(get_message<Shown>(from));
    if (const Shown& shown = known_.back(); shown.arrays.size() != shown.descriptor.bundled())
      WireReader::malformed(std::to_string(shown.arrays.size()) + " arrays of " +
                            std::to_string(shown.descriptor.arrays));
  }
  from.end();
}

std::optional<std::vector<Shown>> MessageAgreement::described() {
  std::vector<std::byte> message;
  while (!is_last_round()) {
    if (!hear(message)) return std::nullopt;
    taken("the description of an operation", world_rank(before()), world_rank(memory_.rank),
          [&] { take_descriptions(message); });
    ++round_;
    if (!is_last_round()) tell_in_full();
  }
  std::vector<Shown> by_member(memory_.members.size());
  for (int i = 0; i < size(); ++i)
    by_member[static_cast<size_t>((memory_.rank + size() - i) % size())] =
        std::move(known_[static_cast<size_t>(i)]);
  known_.clear();
  return by_member;
}

void MessageAgreement::complete(uint32_t sequence) {
  mine_.completed = sequence;
  mine_.holdups.clear();
  board_.show(key_, mine_);
}

// ---- what is known of the others ----

std::optional<StreamProgress> MessageAgreement::told(int r) const {
  return r == memory_.rank ? mine_ : board_.told(key_, world_rank(r)).progress;
}

std::optional<uint32_t> MessageAgreement::begun(int r) const {
  const auto theirs = told(r);
  return theirs ? std::optional(theirs->begun) : std::nullopt;
}

std::optional<uint32_t> MessageAgreement::completed(int r) const {
  const auto theirs = told(r);
  return theirs ? std::optional(theirs->completed) : std::nullopt;
}

bool MessageAgreement::knows_all_of(int r) const {
  return r == memory_.rank || board_.has_finished(world_rank(r));
}

bool MessageAgreement::has_closed(int r) const { return board_.told(key_, world_rank(r)).closed; }

std::vector<int> MessageAgreement::silent() const {
  return is_last_round() ? std::vector<int>() : std::vector<int>{before()};
}

void MessageAgreement::show_holdups(std::span<const int> ranks, TimePoint when) {
  mine_.holdups.assign(ranks.begin(), ranks.end());
  board_.show(key_, mine_);
  if (when < next_question_) return;
  next_question_ = when + kBetweenQuestions;
  for (int r = 0; r < size(); ++r)
    if (r != memory_.rank) board_.ask(key_, memory_.fate, world_rank(r));
}

std::vector<int> MessageAgreement::holdups_of(int r) const {
  auto theirs = told(r);
  if (!theirs) return {};
  std::erase_if(theirs->holdups, [&](int member) { return member < 0 || member >= size(); });
  return std::move(theirs->holdups);
}

}  // namespace farandole
