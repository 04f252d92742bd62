#include "devices/nccl_meeting.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "base/fixed_text.h"
#include "base/log.h"

namespace farandole {
namespace {

/// How long NCCL may take to make a communicator. Many ranks take seconds. After this it counts as
/// stuck, and arrays take another path.
constexpr auto kMeetingPatience = std::chrono::seconds(60);

/// Whether NCCL takes several ranks on a device, which is to be asked of it on all of them. Their
/// kernels wait for each other.
bool takes_several(int version) {
  constexpr int kFirst = 23000;  // 2.30
  const char* const asked = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return version >= kFirst && asked != nullptr && std::strtol(asked, nullptr, 0) != 0;
}

template <typename Message>
Message refusing(std::string_view why) {
  Message message;
  copy_cut(why, message.refusal);
  return message;
}

template <typename Message>
void send(MessageLink& link, const Message& message) {
  WireWriter bytes;
  put_message(bytes, message);
  link.send(bytes.take());
}

template <typename Message>
Message read(const std::vector<std::byte>& bytes) {
  return get_whole<Message>(bytes);
}

}  // namespace

NcclMeeting::NcclMeeting(const Host& host, const Membership& membership, const Connect& connect,
                         std::shared_ptr<DeviceExchange> exchange, bool wanted)
    : host_(host),
      membership_(membership),
      exchange_(std::move(exchange)),
      wanted_(wanted),
      members_(membership.members.size()) {
  for (size_t r = 0; r < members_.size(); ++r)
    if (is_first() != (r == 0))
      members_[r].link = std::make_unique<MessageLink>(connect(static_cast<int>(r), 1));
  if (is_first())
    members_[0].offer = offer();
  else
    send(*members_[0].link, offer());
}

bool NcclMeeting::poll() {
  if (done()) return false;
  bool moved = is_first() ? hear_members() : hear_first();
  moved |= look_at_nccl();
  if (is_first()) moved |= answer();
  if (!all_is_said()) return moved;
  members_.clear();
  return true;
}

// ---- as every member ----

NcclOffer NcclMeeting::offer() const {
  if (!exchange_) return refusing<NcclOffer>("its device cannot be used");
  NcclOffer mine;
  try {
    mine.shares = takes_several(cuda::NcclLibrary::of_process().version);
    copy_cut(exchange_->device().bus_id, mine.bus_id);
    mine.scales = exchange_->scales_results();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::forked) throw;
    return refusing<NcclOffer>(error.verdict());
  }
  return mine;
}

bool NcclMeeting::hear_first() {
  MessageLink& link = *members_[0].link;
  const bool moved = link.poll();
  std::vector<std::byte> message;
  while (link.receive(message))
    if (phase_ == Phase::offering)
      begin_by(read<NcclStart>(message));
    else
      end(text_in(read<NcclOutcome>(message).refusal));
  return moved;
}

void NcclMeeting::begin_by(const NcclStart& start) {
  if (std::string why = text_in(start.refusal); !why.empty()) return end(std::move(why));
  CudaNcclId id;
  if (start.id.size() != sizeof id) WireReader::malformed("an id that is not NCCL's");
  std::memcpy(&id, start.id.data(), sizeof id);
  started_ = true;
  scales_ = start.scales;
  phase_ = Phase::opening;
  until_ = Deadline::after(kMeetingPatience);
  try {
    exchange_->open_nccl(id);
  } catch (const Error& error) {
    say(error.verdict());
  }
}

/// True when it is known whether this rank's end is there.
bool NcclMeeting::look_at_nccl() {
  if (phase_ != Phase::opening) return false;
  try {
    if (exchange_->nccl_ready())
      say("");
    else if (until_.passed(now()))
      say("NCCL has not come up within a minute (NCCL_DEBUG=INFO)");
  } catch (const Error& error) {
    say(error.verdict());
  }
  return phase_ != Phase::opening;
}

void NcclMeeting::say(std::string_view refusal) {
  phase_ = Phase::waiting;
  const auto mine = refusing<NcclOutcome>(refusal);
  if (is_first())
    members_[0].outcome = mine;
  else
    send(*members_[0].link, mine);
}

void NcclMeeting::end(std::string refusal) {
  if (phase_ == Phase::opening) say("given up");  // it is owed, and means nothing any more
  phase_ = Phase::over;
  refusal_ = std::move(refusal);
  if (refusal_.empty()) return;
  if (exchange_) exchange_->abort_nccl();
  log(wanted_ ? LogLevel::warning : LogLevel::info,
      "collectives on devices do without NCCL: " + refusal_);
}

// ---- as the first one ----

bool NcclMeeting::hear_members() {
  bool moved = false;
  std::vector<std::byte> message;
  for (Member& member : members_) {
    if (!member.link) continue;
    moved |= member.link->poll();
    while (member.link->receive(message))
      if (!member.offer)
        member.offer = read<NcclOffer>(message);
      else
        member.outcome = read<NcclOutcome>(message);
  }
  return moved;
}

/// Sends all members what has become known. False if there is nothing new.
bool NcclMeeting::answer() {
  const bool all = std::ranges::none_of(members_, [&](const auto& m) { return owes_a_word(m); });
  if (phase_ == Phase::offering) {
    if (!all) return false;
    const NcclStart started = start();
    tell_all(started);
    begin_by(started);
    return true;
  }
  if (phase_ == Phase::over) return false;
  const auto outcome = refusing<NcclOutcome>(first_refusal());
  const std::string refusal = text_in(outcome.refusal);  // as the others read it
  if (!all && refusal.empty()) return false;
  tell_all(outcome);
  end(refusal);
  return true;
}

NcclStart NcclMeeting::start() const {
  if (const std::string why = why_not_start(); !why.empty()) return refusing<NcclStart>(why);
  NcclStart made;
  made.scales = std::ranges::all_of(members_, [](const Member& m) { return m.offer->scales; });
  try {
    const CudaNcclId id = cuda::NcclCommunicator::make_id();
    made.id.assign(std::begin(id.bytes), std::end(id.bytes));
  } catch (const Error& error) {
    return refusing<NcclStart>(named(0, error.verdict()));
  }
  return made;
}

/// Decides by the offers of all members.
std::string NcclMeeting::why_not_start() const {
  for (size_t r = 0; r < members_.size(); ++r)
    if (const std::string why = text_in(members_[r].offer->refusal); !why.empty())
      return named(r, why);
  if (std::ranges::all_of(members_, [](const Member& m) { return m.offer->shares; })) return "";
  std::map<std::pair<std::string, std::string>, int> owners;  // by host and bus id
  for (size_t r = 0; r < members_.size(); ++r) {
    const int rank = membership_.members[r];
    const std::string& host = host_.peers[static_cast<size_t>(rank)].info.host;
    const auto [owner, alone] =
        owners.try_emplace({host, text_in(members_[r].offer->bus_id)}, rank);
    if (!alone)
      return "NCCL takes one rank on a device, and " + name_ranks({owner->second, rank}) +
             " share one (from 2.30 on it takes several where all ranks have "
             "NCCL_MULTI_RANK_GPU_ENABLE=1)";
  }
  return "";
}

/// The first refusal by rank, among the outcomes received so far.
std::string NcclMeeting::first_refusal() const {
  for (size_t r = 0; r < members_.size(); ++r)
    if (members_[r].outcome)
      if (const std::string why = text_in(members_[r].outcome->refusal); !why.empty())
        return named(r, why);
  return "";
}

std::string NcclMeeting::named(size_t member, std::string_view refusal) const {
  return "rank " + std::to_string(membership_.members[member]) + ": " + std::string(refusal);
}

template <typename Message>
void NcclMeeting::tell_all(const Message& message) {
  for (Member& member : members_)
    if (member.link) send(*member.link, message);
}

bool NcclMeeting::owes_a_word(const Member& member) const {
  return phase_ == Phase::offering ? !member.offer : started_ && !member.outcome;
}

// ---- the end ----

bool NcclMeeting::all_is_said() const {
  return phase_ == Phase::over && std::ranges::all_of(members_, [this](const Member& member) {
           return (!member.link || member.link->sent()) && !(is_first() && owes_a_word(member));
         });
}

std::vector<int> NcclMeeting::silent() const {
  std::vector<int> missing;
  if (!is_first()) {
    if (phase_ == Phase::offering || phase_ == Phase::waiting) missing.push_back(0);
    return missing;
  }
  for (size_t r = 1; r < members_.size(); ++r)
    if (owes_a_word(members_[r])) missing.push_back(static_cast<int>(r));
  return missing;
}

}  // namespace farandole
